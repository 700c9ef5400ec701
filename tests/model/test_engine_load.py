"""An engine's timelines of sequences and its load, as read from other threads."""

import asyncio
import threading
import time

import pytest

from headrace_predictor.engine.interface import EngineStatistics, Timeline
from tests.model.fakes import (
    CROWD,
    FakeRunner,
    Gate,
    assert_crowd_is_unharmed,
    expected,
    read_all,
    request,
    submit_crowd,
)
from tests.waiting import until


async def test_the_times_of_a_timeline_are_in_order(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate), max_running=1)
    before = time.monotonic()
    first, second = engine.submit(request("first", max_tokens=3)), engine.submit(request("second", max_tokens=2))
    assert second.timeline == Timeline(second.timeline.submitted)
    gate.open(1)
    await first.read()
    # Available with the first chunk.
    assert first.timeline.started is not None
    assert first.timeline.first_token is not None
    assert first.timeline.ended is None
    assert second.timeline.started is None
    gate.open(100)
    await read_all(first)
    await read_all(second)
    one, other = first.timeline, second.timeline
    assert before <= one.submitted <= one.started <= one.first_token <= one.ended
    assert one.submitted <= other.submitted <= one.ended <= other.started <= other.first_token <= other.ended
    assert other.ended <= time.monotonic()
    assert (one.preemptions, one.preempted) == (0, ())


async def test_the_time_of_a_step_is_divided_by_the_tokens_that_it_computes(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate), max_running=2)
    with engine._changed:
        long, short, waiting = (engine.submit(request(str(n), prompt=range(5, 5 + n), max_tokens=1)) for n in (9, 3, 2))
    gate.open(2)
    await read_all(long)
    await read_all(short)
    assert long.timeline.engine_s == pytest.approx(3 * short.timeline.engine_s)
    assert waiting.timeline.engine_s == 0
    gate.open(1)
    await read_all(waiting)
    await until(lambda: engine.statistics.steps == 2)
    spent_s = sum(slot.timeline.engine_s for slot in (long, short, waiting))
    assert 0 < spent_s <= engine.statistics.step_ns / 1e9


async def test_preemption_times_are_reported_with_the_end_at_the_latest(engine_of):
    engine = engine_of(FakeRunner(blocks=1 + 20), max_running=4, max_waiting=32)
    prompts = [[number] * 17 for number in range(40, 48)]
    slots = [engine.submit(request(str(i), prompt=prompt, max_tokens=30)) for i, prompt in enumerate(prompts)]
    for prompt, slot in zip(prompts, slots, strict=True):
        assert (await read_all(slot))[0] == expected(prompt, 30)
    times = [slot.timeline for slot in slots]
    assert sum(timeline.preemptions for timeline in times) == engine.statistics.preempted > 0
    for timeline in times:
        assert len(timeline.preempted) == timeline.preemptions
        assert list(timeline.preempted) == sorted(timeline.preempted)
        assert all(timeline.started <= at <= timeline.ended for at in timeline.preempted)


async def test_the_load_counts_running_and_waiting_requests(engine_of):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner, max_running=2)
    idle = engine.load
    assert (idle.running, idle.waiting, idle.batch, idle.blocks_in_use, idle.oldest_age_s) == (0, 0, 0, 0, 0)
    assert engine.statistics == EngineStatistics()
    with engine._changed:
        slots = [engine.submit(request(str(i), prompt=(5, 6, i), max_tokens=4)) for i in range(5)]
    await until(lambda: runner.steps)
    # Read during a step, without waiting for its end.
    load = engine.load
    assert (load.running, load.waiting, load.batch) == (2, 3, 2)
    assert load.blocks_in_use > 0
    assert 0 < load.oldest_age_s <= time.monotonic() - slots[0].timeline.submitted
    gate.open(1000)
    for i, slot in enumerate(slots):
        assert (await read_all(slot))[0] == expected((5, 6, i), 4)
    await until(lambda: engine.load.batch == 0)
    rest = engine.load
    assert (rest.running, rest.waiting, rest.blocks_in_use, rest.oldest_age_s) == (0, 0, 0, 0)
    assert (engine.statistics.tokens, engine.statistics.prompt_tokens) == (20, 15)


async def test_the_load_can_be_read_from_any_thread_at_any_time(engine_of):
    engine = engine_of(FakeRunner(blocks=40), max_running=4, max_waiting=64)
    done = threading.Event()
    seen = []

    def watch():
        while not done.wait(0.0005):
            seen.append(engine.load)

    threads = [threading.Thread(target=watch) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        await assert_crowd_is_unharmed(submit_crowd(engine))
    finally:
        done.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
    assert all(0 <= load.blocks_in_use <= 1 for load in seen)
    assert all(load.running <= 4 and load.batch <= 4 and load.running + load.waiting <= len(CROWD) for load in seen)
    assert engine.statistics.tokens == 12 * len(CROWD)
