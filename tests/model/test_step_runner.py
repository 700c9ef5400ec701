"""After a failed step a real forward pass must succeed before readers get an error; otherwise the engine is dead."""

import pytest
import torch

from headrace.errors import HopBrokenError, NotReadyError, RequestFailedError
from tests.model.fakes import (
    CROWD,
    FakeRunner,
    assert_crowd_is_unharmed,
    dead,
    expected,
    outcome,
    read_all,
    request,
    submit_crowd,
)


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
        # The outcomes that readers have by now.
        self.probed_with.append([slot._error for slot in self.slots])
        if self._probe_fails:
            raise RuntimeError("the model is broken")


HOW = pytest.mark.parametrize("how", ["raises", "memory", "numbers"])


@HOW
async def test_if_all_requests_fail_the_model_is_probed_before_they_end(engine_of, how):
    runner = Failing(how)
    engine = engine_of(runner)
    runner.slots = [engine.submit(request("bad"))]
    assert await outcome(runner.slots[0]) is RequestFailedError
    assert runner.probed_with == [[None]]
    assert (await read_all(engine.submit(request("next"))))[0] == expected((5, 6))


@HOW
async def test_if_the_probe_fails_the_engine_is_dead_and_no_request_is_to_blame(engine_of, how):
    engine = engine_of(Failing(how, probe_fails=True), max_running=1)
    slots = [engine.submit(request(name)) for name in ("bad", "waiting")]
    assert [await outcome(slot) for slot in slots] == [HopBrokenError, NotReadyError]
    await dead(engine)


@pytest.mark.parametrize("how", ["raises", "numbers"])
async def test_if_other_requests_succeed_no_probe_is_needed(engine_of, how):
    runner = Failing(how)
    engine = engine_of(runner, max_running=16, max_waiting=32)
    # The others are submitted before the bad one.
    with engine._changed:
        slots = submit_crowd(engine)
        bad = engine.submit(request("bad"))
    assert await outcome(bad) is RequestFailedError
    await assert_crowd_is_unharmed(slots)
    assert len(slots) == len(CROWD)
    assert runner.probed_with == []
