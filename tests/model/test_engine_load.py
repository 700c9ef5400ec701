"""An engine's timelines of sequences and its load, as read from other threads."""

import asyncio
import threading

import pytest

from tests.model.fakes import CROWD, FakeRunner, Gate, assert_crowd_is_unharmed, read_all, request, submit_crowd
from tests.support.in_process_engine import submit
from tests.waiting import until


async def test_the_time_of_a_step_is_divided_by_the_tokens_that_it_computes(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate), max_running=2)
    with engine._changed:
        long, short, waiting = (
            submit(engine, request(str(n), prompt=range(5, 5 + n), max_tokens=1)) for n in (9, 3, 2)
        )
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
