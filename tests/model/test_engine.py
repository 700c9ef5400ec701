"""The engine: many sequences at once, each independent of the others, and every one ends."""

import time

import pytest

from headrace.errors import DeadlineError
from tests.model.fakes import FakeRunner, Gate, expected, read_all, request
from tests.support.in_process_engine import submit
from tests.waiting import until


async def test_the_deadline_ends_running_and_waiting_requests(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate), max_running=1)
    deadline = time.monotonic() + 0.05
    slots = [submit(engine, request(name, deadline=deadline, max_tokens=1000)) for name in "ab"]
    await until(lambda: time.monotonic() > deadline)
    gate.open(2)
    for slot in slots:
        with pytest.raises(DeadlineError):
            await read_all(slot)
    assert engine.load.blocks_in_use == 0


async def test_a_slow_reader_gets_bigger_chunks_and_misses_nothing(engine_of):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner)
    slot = submit(engine, request(max_tokens=12))
    gate.open(8)
    await until(lambda: runner.calls.get("a", 0) == 9)
    gate.open(4)
    ids, chunks = await read_all(slot)
    assert ids == expected([5, 6], 12)
    assert len(chunks[0].output_ids) >= 7


async def test_chunk_tokens_gathers_tokens_but_never_the_last(engine_of):
    engine = engine_of(FakeRunner())
    _, chunks = await read_all(submit(engine, request(chunk_tokens=5, max_tokens=12)))
    assert all(len(chunk.output_ids) >= 5 for chunk in chunks[:-1])
    assert sum(len(chunk.output_ids) for chunk in chunks) == 12


async def test_chunk_ms_limits_how_long_tokens_are_held_back(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate))
    slot = submit(engine, request(chunk_tokens=100, chunk_ms=20, max_tokens=12))
    gate.open(2)
    assert len((await slot.read()).output_ids) in (1, 2)
    gate.open(100)
    await read_all(slot)


async def test_a_pace_is_kept_beside_others_that_have_none(engine_of):
    engine = engine_of(FakeRunner())
    started = time.monotonic()
    paced = [submit(engine, request(f"paced {i}", max_tokens=6, pace=100)) for i in range(3)]
    assert (await read_all(submit(engine, request("other"))))[0] == expected([5, 6], 12)
    for slot in paced:
        assert (await read_all(slot))[0] == expected([5, 6], 6)
    assert time.monotonic() - started >= 5 / 100


async def test_a_paced_sequence_that_is_cancelled_ends_before_its_next_token(engine_of):
    engine = engine_of(FakeRunner(), max_running=1)
    paced = submit(engine, request("paced", max_tokens=1000, pace=5))
    await paced.read()
    paced.cancel()
    assert (await read_all(submit(engine, request("next"))))[0] == expected([5, 6], 12)
