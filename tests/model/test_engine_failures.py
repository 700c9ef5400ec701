"""A failure of one request, or of the model, ends the affected requests and no others.

After a failed step a real forward pass must succeed before readers get an error; otherwise the engine is dead.
"""

import asyncio

import pytest
import torch

from headrace.errors import HopBrokenError, NotReadyError, RequestFailedError
from tests.model.fakes import (
    CROWD,
    FakeRunner,
    Gate,
    assert_crowd_is_unharmed,
    dead,
    expected,
    outcome,
    read_all,
    request,
    submit_crowd,
)
from tests.support.in_process_engine import submit
from tests.waiting import until


def poison(error, name="bad", outputs=3):
    """Raises in the middle of a step, after other rows have been written."""

    def before(row):
        if row.sequence.id == name and len(row.sequence.output_ids) >= outputs:
            raise error

    return before


@pytest.mark.parametrize("outputs", [0, 1, 11])
@pytest.mark.parametrize("error", [IndexError("index out of range in self"), RuntimeError("poison"), StopIteration()])
async def test_a_request_that_raises_in_a_crowd_fails_alone(engine_of, error, outputs):
    engine = engine_of(FakeRunner(poison(error, outputs=outputs), blocks=60), max_running=5, max_waiting=32)
    bad = submit(engine, request("bad", prompt=range(9)))
    slots = submit_crowd(engine)
    assert await outcome(bad) is RequestFailedError
    await assert_crowd_is_unharmed(slots)
    assert engine.load.blocks_in_use == 0
    assert (engine.statistics.failed, engine.statistics.succeeded) == (1, len(CROWD))


async def test_the_blocks_of_a_failed_request_are_not_reused(engine_of):
    runner = FakeRunner(poison(RuntimeError("poison")), blocks=60)
    engine = engine_of(runner)
    prompt = range(3, 15)
    assert await outcome(submit(engine, request("bad", prompt=prompt))) is RequestFailedError
    ids, chunks = await read_all(submit(engine, request("next", prompt=prompt)))
    assert ids == expected(prompt)
    assert chunks[-1].usage.cached_tokens == 0


class NotANumber(FakeRunner):
    """Gives NaN for the request named bad once it has `outputs`, and records which blocks were cleared."""

    def __init__(self, outputs, **given):
        super().__init__(**given)
        self.outputs = outputs
        self.blocks: list[int] = []
        self.cleared: list[int] = []

    def run(self, rows):
        logits = super().run(rows)
        for index, row in enumerate(row for row in rows if row.samples):
            if row.sequence.id == "bad" and len(row.sequence.output_ids) >= self.outputs:
                self.blocks = list(row.sequence.blocks)
                logits[index] = torch.nan
        return logits

    def clear(self, blocks):
        super().clear(blocks)
        self.cleared += blocks


@pytest.mark.parametrize("outputs", [0, 5])
@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.5, "logprobs": True}])
async def test_nan_logits_fail_only_their_request(engine_of, outputs, parameters):
    runner = NotANumber(outputs, blocks=60)
    engine = engine_of(runner, max_running=5, max_waiting=32)
    prompt = range(20, 31)
    bad = submit(engine, request("bad", prompt=prompt, **parameters))
    slots = submit_crowd(engine, **parameters)
    assert await outcome(bad) is RequestFailedError
    await assert_crowd_is_unharmed(slots, **parameters)
    ids, chunks = await read_all(submit(engine, request("next", prompt=prompt, **parameters)))
    assert ids == expected(prompt, **parameters)
    assert chunks[-1].usage.cached_tokens == 0
    assert sorted(runner.cleared) == sorted(runner.blocks) != []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("an illegal access"),
    ],
)
async def test_a_device_error_ends_the_engine_at_once(engine_of, error):
    calls = []

    class Device(FakeRunner):
        def run(self, rows):
            calls.append(1)
            if len(calls) == 3:
                raise error
            return super().run(rows)

    engine = engine_of(Device(), max_running=4, max_waiting=32)
    outcomes = [await outcome(slot) for slot in submit_crowd(engine)]
    assert set(outcomes) == {HopBrokenError, NotReadyError}
    assert outcomes.count(HopBrokenError) == 4
    await dead(engine)
    assert len(calls) == 3


async def test_a_device_error_while_blocks_are_cleared_leaves_no_reader_waiting(engine_of):
    class Device(NotANumber):
        def clear(self, blocks):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gate = Gate()
    engine = engine_of(Device(3, before=gate))
    slots = [submit(engine, request(name, prompt=(5, 6, 7))) for name in ("first", "bad", "last")]
    readers = [asyncio.create_task(outcome(slot)) for slot in slots]
    gate.open(9)
    # All of them wait for the step in which the engine dies; the first one gets a token before that.
    await until(lambda: engine.statistics.tokens == 9 and all(slot._wake is not None for slot in slots))
    gate.open(100)
    assert await asyncio.gather(*readers) == [HopBrokenError, RequestFailedError, HopBrokenError]
    await dead(engine)


class Failing(FakeRunner):
    """Fails the requests named bad, in one of several ways, and records when it was probed."""

    def __init__(self, how, probe_fails=False):
        super().__init__()
        self._how = how
        self._probe_fails = probe_fails
        self.probed_with = []
        self.slots = []

    def run(self, rows):
        bad = [row for row in rows if row.sequence.id.startswith("bad")]
        if bad and self._how == "raises":
            raise RuntimeError("poison")
        if bad and self._how == "memory":
            raise MemoryError
        logits = super().run(rows)
        for index, row in enumerate(row for row in rows if row.samples):
            if row in bad:
                logits[index] = torch.nan
        return logits

    def probe(self):
        # Whether requests have ended by now.
        self.probed_with.append([slot.timeline.ended for slot in self.slots])
        if self._probe_fails:
            raise RuntimeError("the model is broken")


HOW = pytest.mark.parametrize("how", ["raises", "memory", "numbers"])


@HOW
async def test_if_all_requests_fail_the_model_is_probed_before_they_end(engine_of, how):
    runner = Failing(how)
    engine = engine_of(runner)
    runner.slots = [submit(engine, request("bad"))]
    assert await outcome(runner.slots[0]) is RequestFailedError
    assert runner.probed_with == [[None]]
    assert (await read_all(submit(engine, request("next"))))[0] == expected((5, 6))


@HOW
async def test_if_the_probe_fails_the_engine_is_dead_and_no_request_is_to_blame(engine_of, how):
    engine = engine_of(Failing(how, probe_fails=True), max_running=1)
    slots = [submit(engine, request(name)) for name in ("bad", "waiting")]
    assert [await outcome(slot) for slot in slots] == [HopBrokenError, NotReadyError]
    await dead(engine)


@pytest.mark.parametrize("how", ["raises", "numbers"])
async def test_if_other_requests_succeed_no_probe_is_needed(engine_of, how):
    runner = Failing(how)
    engine = engine_of(runner, max_running=16, max_waiting=32)
    # The others are submitted before the bad one.
    with engine._changed:
        slots = submit_crowd(engine)
        bad = submit(engine, request("bad"))
    assert await outcome(bad) is RequestFailedError
    await assert_crowd_is_unharmed(slots)
    assert runner.probed_with == []
