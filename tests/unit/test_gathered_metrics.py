"""Values that are handed to OpenTelemetry's SDK when it collects: none is lost, each counts as itself."""

import threading

from opentelemetry import metrics

from headrace.telemetry.gathered import histogram
from tests.support.measured import Measured

BUCKETS = (1.0, 2.0)


def test_a_collection_counts_each_value_by_its_attributes():
    measured = Measured()
    seconds = histogram(measured.meter, "wait", "s", "Waits.", BUCKETS)
    same = {"model": "a"}
    for value in (0.5, 1.5, 1.75):
        seconds.record(value, same)
    seconds.record(3.0, {"model": "a"})
    seconds.record(0.25, {"model": "b"})
    points = measured.points("wait")
    point = points[frozenset({("model", "a")})]
    assert (point.bucket_counts, point.count, point.sum) == ((1, 2, 1), 4, 6.75)
    assert (point.min, point.max, point.explicit_bounds) == (0.5, 3.0, BUCKETS)
    assert points[frozenset({("model", "b")})].bucket_counts == (1, 0, 0)
    seconds.record(0.5, same)
    assert measured.count("wait", same) == 5


def test_equal_names_give_one_instrument_of_a_meter():
    measured = Measured()
    assert histogram(measured.meter, "wait", "s", "Waits.", BUCKETS) is histogram(
        measured.meter, "wait", "s", "Waits.", BUCKETS
    )


def test_other_histograms_are_unchanged():
    measured = Measured()
    measured.meter.create_histogram("other", explicit_bucket_boundaries_advisory=BUCKETS).record(1.5, {"a": "b"})
    assert measured.points("other")[frozenset({("a", "b")})].bucket_counts == (0, 1, 0)


def test_uncollected_values_take_no_memory():
    seconds = histogram(metrics.NoOpMeterProvider().get_meter("none"), "wait", "s", "Waits.", BUCKETS)
    for _ in range(5000):
        seconds.record(1.0, {})
    assert len(seconds._waiting) < 2000


def test_no_value_is_lost_during_a_collection():
    measured = Measured()
    seconds = histogram(measured.meter, "wait", "s", "Waits.", BUCKETS)

    def record():
        for _ in range(3000):
            seconds.record(0.5, {"model": "a"})

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        measured.points("wait")
    assert measured.count("wait", {"model": "a"}) == 12_000
