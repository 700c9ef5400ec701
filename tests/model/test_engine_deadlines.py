"""Deadlines of waiting and running requests and of the first token; a request that would be late is refused at once."""

import pytest

from headrace.errors import DeadlineError, OverloadedError
from tests.model.fakes import FakeRunner, Gate, expected, read_all, request
from tests.support.in_process_engine import submit
from tests.waiting import until


async def test_a_late_first_token_ends_waiting_requests_and_running_prompts(engine_of, clock):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner, max_running=2, step_tokens=16)
    prompt = submit(engine, request("prompt", prompt=range(40), first_token_timeout_s=1.5))
    other = submit(engine, request("other"))
    waiting = submit(engine, request("waiting", first_token_timeout_s=1.5))
    await until(lambda: runner.steps)
    clock[0] += 1.6
    gate.open(1000)
    for slot in (prompt, waiting):
        with pytest.raises(DeadlineError, match="no token within 1500 ms"):
            await read_all(slot)
    assert (await read_all(other))[0] == expected((5, 6))
    assert engine.load.blocks_in_use == 0


async def test_the_first_tokens_deadline_does_not_apply_after_it(engine_of, clock):
    gate = Gate()
    engine = engine_of(FakeRunner(gate))
    # Submitted together, so that one step serves both.
    with engine._changed:
        slots = [
            submit(engine, request(first_token_timeout_s=1.0)),
            submit(engine, request("moved", prompt=(7,), output_ids=expected((7,), 3), first_token_timeout_s=1.0)),
        ]
    gate.open(2)
    for slot in slots:
        assert await slot.read()
    clock[0] += 3600
    gate.open(1000)
    assert len((await read_all(slots[0]))[0]) == 11
    assert len((await read_all(slots[1]))[0]) == 8


async def test_a_resumed_requests_earlier_tokens_do_not_count_as_the_first_token(engine_of, clock):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner)
    slot = submit(engine, request("moved", prompt=range(80), output_ids=[3], first_token_timeout_s=1.0))
    await until(lambda: runner.steps)
    clock[0] += 2
    gate.open(1000)
    with pytest.raises(DeadlineError, match="no token within 1000 ms"):
        await read_all(slot)


class Timed:
    """An engine with one place; each request takes a second of its time."""

    def __init__(self, engine_of, clock):
        self.gate = Gate()

        def before(row):
            self.gate(row)
            clock[0] += 1.0

        self.runner = FakeRunner(before)
        self.engine = engine_of(self.runner, max_running=1, max_waiting=100)

    def submit(self, **given):
        return submit(self.engine, request(max_tokens=1, **given))

    async def busy(self, waiting):
        """Ten requests end one after the other, then one runs and `waiting` wait; returns these."""
        slots = [self.submit() for _ in range(11 + waiting)]
        self.gate.open(10)
        await until(lambda: len(self.runner.steps) == 11)
        return slots[10:]

    async def end(self, slots):
        self.gate.open(1000)
        for slot in slots:
            await read_all(slot)


@pytest.mark.parametrize("wanted", [{"deadline": 1012.0}, {"first_token_timeout_s": 2.0}])
async def test_a_request_that_would_be_late_is_refused_at_once_with_a_retry_delay(engine_of, clock, wanted):
    timed = Timed(engine_of, clock)
    slots = await timed.busy(waiting=5)
    with pytest.raises(OverloadedError, match="longer than the request can wait") as raised:
        timed.submit(**wanted)
    assert 800 <= raised.value.retry_after_ms <= 1200
    slots += [timed.submit(), timed.submit(deadline=1060.0, first_token_timeout_s=50.0)]
    await timed.end(slots)


async def test_a_waiting_request_that_has_become_hopeless_leaves_its_place_to_others(engine_of, clock):
    timed = Timed(engine_of, clock)
    slots = await timed.busy(waiting=1)
    late = timed.submit(deadline=clock[0] + 4.0)
    slots += [timed.submit() for _ in range(3)]
    # While it waits, an unforeseeable amount of time passes.
    clock[0] += 2.5
    timed.gate.open(1)
    with pytest.raises(OverloadedError, match="longer than the request can wait"):
        await read_all(late)
    await timed.end(slots)
