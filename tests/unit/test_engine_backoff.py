"""An engine is started again at once, and later and later if that does not help."""

import pytest

from services.predictor.repository import backoff
from services.predictor.repository.backoff import Backoff


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(backoff, "time", clock)
    return clock


def test_an_engine_that_has_run_for_long_is_started_again_at_once(clock):
    starts = Backoff()
    for _ in range(20):
        starts.started()
        clock.now += 60
        assert starts.delay_s() == 0


def test_engines_that_live_briefly_are_started_later_and_later(clock):
    starts = Backoff()
    delays = []
    for _ in range(20):
        starts.started()
        clock.now += 1
        delays.append(starts.delay_s())
    assert delays[:5] == [0, 0, 0, 0.5, 1]
    assert delays == sorted(delays)
    assert delays[-1] == 30


def test_starts_that_fail_are_repeated_later_and_later(clock):
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
