"""The load test's figures: quantiles are exact to half a per cent; seconds and processes add up."""

import json
import random

import pytest

from loadtest import figures
from loadtest.figures import Figures, Histogram, SlowRequest, verdicts
from loadtest.knee.search import measured
from loadtest.measures import KEPT_S, Measures
from loadtest.options import parse_objective


def histogram_of(values):
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


def test_quantiles_are_within_half_a_per_cent():
    dice = random.Random(1)
    values = sorted(dice.lognormvariate(3, 2) for _ in range(5000))
    histogram = histogram_of(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[round(share * 5000) - 1], rel=0.005)
    assert histogram.quantile(1) == values[-1]


def test_histograms_of_two_processes_add_up():
    dice = random.Random(2)
    values = [dice.expovariate(0.1) for _ in range(1000)]
    sent = json.loads(json.dumps(histogram_of(values[600:]).to_message()))
    total = histogram_of(values[:600])
    total.add(Histogram.from_message(sent))
    whole = histogram_of(values)
    assert total.buckets == whole.buckets
    assert (total.count, total.least, total.greatest) == (1000, min(values), max(values))


def test_an_empty_histogram_has_no_quantiles_and_zero_is_a_value():
    assert Histogram().quantile(0.5) is None
    assert Histogram().quantiles((0.5,)) == {}
    assert Histogram.from_message(Histogram().to_message()).quantile(0.5) is None
    assert histogram_of([0.0]).quantile(0.5) == 0.0


def test_a_call_without_a_stream_is_among_the_slowest_only_where_streams_are_few():
    figures = Figures()
    for number in range(12):
        figures.note_slow(SlowRequest("infer", f"i{number}", "", whole_ms=1000 + number))
        if number % 2:
            figures.note_slow(SlowRequest("Generate", f"g{number}", "", whole_ms=50, ttft_ms=number))
    assert [slow.request_id for slow in figures.slowest] == [
        "g11",
        "g9",
        "g7",
        "g5",
        "g3",
        "g1",
        "i11",
        "i10",
        "i9",
        "i8",
    ]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_window_has_only_its_seconds_and_the_total_has_all():
    clock = Clock()
    measures = Measures(clock)
    for second in range(5):
        clock.now = 1000.5 + second
        measures.current().counts["Generate", figures.TOKENS] += 10**second
    clock.now += 1
    assert measures.window(1001, 1003).count(figures.TOKENS) == 110
    assert measures.latest(2).count(figures.TOKENS) == 11000
    assert measures.total.count(figures.TOKENS) == 11111
    clock.now += KEPT_S
    measures.current()
    clock.now += 1
    assert set(measures.seconds) == {1000 + 5 + KEPT_S}
    assert measures.total.count(figures.TOKENS) == 11111


def test_the_master_gets_the_measurements_of_its_workers():
    clock = Clock()
    worker, master = Measures(clock), Measures(clock)
    for second in range(3):
        clock.now = 1000 + second
        worker.current().record("Generate", figures.TTFT, 10.0 * (second + 1))
    clock.now += 1
    master.absorb(json.loads(json.dumps(worker.drain())))
    assert worker.drain() == []
    assert master.total.of(figures.TTFT).count == 3
    assert master.window(1002, 1003).of(figures.TTFT).quantile(0.5) == 30.0


@pytest.mark.parametrize(
    ("text", "values", "met"),
    [
        ("", {"ttft": 1e9}, True),
        ("TTFT <= 300 ms, gap <= 50ms", {"ttft": 300.0, "gap": 50.0}, True),
        ("TTFT <= 300 ms, gap <= 50 ms", {"ttft": 300.1, "gap": 1.0}, False),
        ("ttft<0.3s,gap<50ms", {"ttft": 1.0, "gap": 51.0}, False),
        ("whole <= 2 s", {"ttft": 1e9, "whole": 1999.0}, True),
        ("gap <= 1 ms", {"gap": None, "whole": 5.0}, True),
    ],
)
def test_objectives(text, values, met):
    assert parse_objective(text).met(values) is met


@pytest.mark.parametrize(
    "text", ["quick", "TTFT <= 300", "TTFT >= 3 ms", "latency <= 3 ms", "TTFT <= -1 ms", "gap <= 1 ms,"]
)
def test_malformed_objectives_are_refused(text):
    with pytest.raises(ValueError, match="is not like"):
        parse_objective(text)


def counted(requests, good, failed=0):
    found = Figures()
    found.counts.update(
        {
            ("Generate", figures.REQUESTS): requests,
            ("Generate", figures.GOOD): good,
            ("Generate", figures.FAILED): failed,
        }
    )
    return found


def test_a_row_holds_if_enough_of_its_requests_were_good():
    assert verdicts(counted(100, 95), 95)["Generate"][0]
    held, words = verdicts(counted(100, 94, 6), 95)["Generate"]
    assert not held
    assert words.startswith("94.0 % of 100 requests good, 6 failed")
    assert not verdicts(counted(0, 0), 50)["Generate"][0]


def test_a_level_of_the_knee_holds_by_its_requests():
    found = counted(40, 39, 1)
    found.record("Generate", figures.TTFT, 100.0)
    level = measured(found, users=8, seconds=10, least_percent=95.0)
    assert (level.held, level.goodput, level.failed, level.ttft_p50, level.gap_p99) == (True, 3.9, 1, 100.0, None)
    assert not measured(Figures(), users=8, seconds=10, least_percent=95.0).held, "nothing was answered"
