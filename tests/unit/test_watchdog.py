"""A watchdog distinguishes a stuck activity from an idle and a moving one, and from its own interruption."""

import threading
from types import SimpleNamespace

import pytest

from headrace.rpc.server import watchdog
from headrace.rpc.server.watchdog import Watchdog
from tests.waiting import until


class Clock:
    """A clock that the watchdog's checks move: each check takes as long as the test says."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.look_s = LOOK_S
        self.looks = 0
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=self.monotonic))

    def monotonic(self):
        self.looks += 1
        self.now += self.look_s
        return self.now


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


LIMIT_S = 0.02
LOOK_S = LIMIT_S / 4


@pytest.fixture
def watch():
    """Starts watchdogs of `mark`; they end with the test."""
    made = []

    def make(mark):
        stuck = threading.Event()
        one = Watchdog("watchdog", LIMIT_S, mark, stuck.set)
        made.append(one)
        one.start()
        return stuck

    yield make
    for one in made:
        one.end()
        one.join()
        assert not one.is_alive()


async def test_an_activity_without_progress_beyond_the_limit_is_stuck(clock, watch):
    stuck = watch(lambda: 7)
    await until(stuck.is_set)
    assert LIMIT_S < clock.now - 1000.0 < 3 * LIMIT_S


async def test_a_moving_or_idle_activity_is_not_stuck(clock, watch):
    numbers = iter(range(10_000))
    moves, rests = watch(lambda: next(numbers) // 3), watch(lambda: None)
    await until(lambda: clock.looks > 100)
    assert not moves.is_set()
    assert not rests.is_set()


async def test_time_in_which_the_watchdog_did_not_run_does_not_count(clock, watch):
    clock.look_s = LOOK_S / 100
    numbers = [0]
    stuck = watch(lambda: numbers[0])
    # An hour between two checks; then the activity goes on as well.
    for _ in range(3):
        before = clock.looks
        clock.now += 3600
        await until(lambda before=before: clock.looks > before + 2)
        numbers[0] += 1
    assert not stuck.is_set()
