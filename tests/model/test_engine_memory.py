"""If memory is too small for a step the engine computes less at once; a request fails only if nothing else helps."""

import pytest
import torch

from headrace.errors import RequestFailedError
from tests.model.fakes import FakeRunner, assert_crowd_is_unharmed, expected, outcome, read_all, request, submit_crowd
from tests.support.in_process_engine import submit


class Scarce(FakeRunner):
    """Has memory for steps of `tokens` tokens and `rows` rows at most."""

    def __init__(self, error, tokens=10_000, rows=10_000):
        super().__init__(blocks=200)
        self.error = error
        self.tokens = tokens
        self.rows = rows

    def run(self, rows):
        if sum(row.count for row in rows) > self.tokens or len(rows) > self.rows:
            raise self.error
        return super().run(rows)


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    torch.AcceleratorError("CUDA error: out of memory"),  # Of pinned memory, or of a kernel's first launch.
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_if_memory_is_short_steps_shrink_and_all_requests_are_served(engine_of, error):
    runner = Scarce(error, tokens=20)
    engine = engine_of(runner, max_running=4, max_waiting=32, step_tokens=64)
    prompts = [[i] * 40 for i in range(3, 8)]
    slots = [submit(engine, request(str(i), prompt=prompt)) for i, prompt in enumerate(prompts)]
    for prompt, slot in zip(prompts, slots, strict=True):
        assert (await read_all(slot))[0] == expected(prompt)
    assert engine.statistics.failed == 0
    assert max(sum(count for _, _, count in step) for step in runner.steps) <= 20


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("rows", [1, 2])
async def test_if_memory_is_shorter_fewer_requests_run_at_once_and_all_are_served(engine_of, error, rows):
    engine = engine_of(Scarce(error, rows=rows), max_running=4, max_waiting=32)
    await assert_crowd_is_unharmed(submit_crowd(engine))
    assert engine.statistics.failed == 0
    assert engine.statistics.preempted > 0
    assert engine.load.blocks_in_use == 0


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_a_request_that_does_not_fit_memory_alone_fails_and_the_next_are_served(engine_of, error):
    runner = Scarce(error, rows=0)
    engine = engine_of(runner, max_running=4, max_waiting=32, step_tokens=64)
    assert await outcome(submit(engine, request("too large", prompt=[3] * 40))) is RequestFailedError
    assert engine.load.blocks_in_use == 0
    runner.rows = 10_000
    await assert_crowd_is_unharmed(submit_crowd(engine))
    # Steps are as large again as before.
    await read_all(submit(engine, request("large", prompt=[3] * 60)))
    assert runner.calls["large"] == 60 + 11
    assert any(("large", 0, 60) in step for step in runner.steps)


async def test_a_shortage_of_memory_while_a_failed_step_is_repeated_fails_no_other_request(engine_of):
    raised = []

    def before(row):
        if len(row.sequence.output_ids) != 3:
            return
        if row.sequence.id == "bad":
            raise RuntimeError("poison")
        if row.sequence.id == "last" and not raised:
            raised.append(1)
            raise MemoryError

    engine = engine_of(FakeRunner(before))
    good, bad, last = (submit(engine, request(name)) for name in ("good", "bad", "last"))
    assert await outcome(bad) is RequestFailedError
    assert await outcome(good) == expected((5, 6))
    assert await outcome(last) == expected((5, 6))
    assert raised
