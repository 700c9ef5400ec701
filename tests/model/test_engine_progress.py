"""A stream that steps leave out ends its engine, and one that only waits for older ones does not."""

import logging
import time

import pytest

from headrace.errors import HopBrokenError, NotReadyError
from tests.model.crowd import dead, outcome
from tests.model.fakes import FakeRunner, engines, request


async def test_a_stream_without_progress_ends_the_engine(caplog):
    with engines() as make, caplog.at_level(logging.CRITICAL):
        engine = make(FakeRunner(lambda _: time.sleep(0.001)), step_timeout_s=0.2)
        schedule = engine._scheduler.schedule

        def passing_by(*arguments):
            return [row for row in schedule(*arguments) if row.sequence.id != "stuck"]

        engine._scheduler.schedule = passing_by
        slots = [engine.submit(request(name, max_tokens=900)) for name in ("stuck", "beside")]
        # A request that took no part in any step is not to blame.
        assert [await outcome(slot) for slot in slots] == [NotReadyError, HopBrokenError]
        await dead(engine)
    assert "request stuck gets no token" in caplog.text


@pytest.mark.parametrize("prompts", [3])
async def test_a_prompt_that_waits_for_older_ones_is_not_stuck(prompts):
    with engines() as make:
        engine = make(FakeRunner(), step_tokens=16, step_timeout_s=0.3)
        slots = [engine.submit(request(str(i), prompt=[i] * 900, max_tokens=2)) for i in range(prompts)]
        for slot in slots:
            assert isinstance(await outcome(slot), list)
