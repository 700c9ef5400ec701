"""A dead engine is restarted at once, then after longer and longer delays."""

import pytest

from headrace_predictor.repository import entry
from headrace_predictor.repository.entry import Backoff


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(entry, "time", clock)
    return clock


def test_an_engine_that_ran_for_long_is_restarted_at_once(clock):
    starts = Backoff()
    for _ in range(20):
        starts.started()
        clock.now += 60
        assert starts.delay_s() == 0


def test_engines_that_die_soon_are_restarted_after_growing_delays(clock):
    starts = Backoff()
    delays = []
    for _ in range(20):
        starts.started()
        clock.now += 1
        delays.append(starts.delay_s())
    assert delays[:5] == [0, 0, 0, 0.5, 1]
    assert delays == sorted(delays)
    assert delays[-1] == 30


def test_failed_starts_are_repeated_after_growing_delays(clock):
    starts = Backoff()
    starts.started()
    clock.now += 60
    assert starts.delay_s() == 0
    delays = []
    for _ in range(10):
        starts.failed()
        delays.append(starts.delay_s())
    assert delays[:3] == [0.5, 1, 2]
    assert delays[-1] == 30
