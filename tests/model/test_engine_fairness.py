"""A client with many streams hardly delays a client with few, and changes no answer."""

import asyncio

import pytest

from headrace.errors import OverloadedError
from tests.model.fakes import FakeRunner, Gate, expected, read_all, request
from tests.waiting import until

SLOTS = 8


def prompt_of(i: int) -> list[int]:
    return [i % 60, 3, i // 60 + 3, 5, 9, i % 7]


async def test_a_light_client_gets_its_first_token_at_once_and_all_answers_are_exact(engine_of):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner, max_running=SLOTS, max_waiting=100)
    heavy = [engine.submit(request(f"heavy{i}", prompt_of(i), client="heavy")) for i in range(3 * SLOTS)]
    await until(lambda: runner.steps)
    # Enough rows for its first steps; the engine waits within a later one.
    gate.open(5 * SLOTS)
    await until(lambda: engine.load.running == SLOTS and len(runner.steps) > 3)
    before = len(runner.steps)
    light = engine.submit(request("light", range(20, 30), client="light"))
    gate.open(100_000)
    assert (await read_all(light))[0] == expected(range(20, 30))
    for i, slot in enumerate(heavy):
        assert (await read_all(slot))[0] == expected(prompt_of(i))
    steps = [{name for name, _, _ in step} for step in runner.steps[before:]]
    first, last = (
        steps.index(step) for step in (next(s for s in steps if "light" in s), [s for s in steps if "light" in s][-1])
    )
    assert first <= 1
    assert all("light" in step for step in steps[first : last + 1])
    assert engine.statistics.preempted == 1
    assert engine.load.blocks_in_use == 0


async def test_a_full_queue_of_one_client_has_a_place_for_another(engine_of):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner, max_running=2, max_waiting=4)
    heavy = [engine.submit(request("heavy0", prompt_of(0), client="heavy"))]
    await until(lambda: runner.steps)
    heavy += [engine.submit(request(f"heavy{i}", prompt_of(i), client="heavy")) for i in range(1, 5)]
    with pytest.raises(OverloadedError):
        engine.submit(request("heavy", client="heavy"))
    light = engine.submit(request("light", client="light"))
    gate.open(100_000)
    answers = await asyncio.gather(*map(read_all, [light, *heavy]), return_exceptions=True)
    assert isinstance(answers[-1], OverloadedError)
    assert answers[-1].retry_after_ms is not None
    assert [ids for ids, _ in answers[:-1]] == [expected((5, 6)), *(expected(prompt_of(i)) for i in range(4))]
