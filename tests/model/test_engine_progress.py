"""A stream that steps leave out ends its engine, and one that only waits for older ones does not.

A row takes a second by the engine's clock, and steps may pass a stream by for ten.
"""

import logging

import pytest

from headrace.errors import HopBrokenError, NotReadyError
from tests.model.crowd import dead, outcome
from tests.model.fakes import FakeRunner, request

PROMPTS = 3


@pytest.fixture
def runner(clock):
    def before(_):
        clock[0] += 1.0

    return FakeRunner(before)


async def test_a_stream_without_progress_ends_the_engine(engine_of, runner, caplog):
    engine = engine_of(runner, step_timeout_s=10)
    schedule = engine._scheduler.schedule

    def passing_by(*arguments):
        return [row for row in schedule(*arguments) if row.sequence.id != "stuck"]

    engine._scheduler.schedule = passing_by
    with caplog.at_level(logging.CRITICAL):
        slots = [engine.submit(request(name, max_tokens=900)) for name in ("stuck", "beside")]
        # A request that took no part in any step is not to blame.
        assert [await outcome(slot) for slot in slots] == [NotReadyError, HopBrokenError]
        await dead(engine)
    assert "request stuck gets no token" in caplog.text


async def test_a_prompt_that_waits_for_older_ones_is_not_stuck(engine_of, runner):
    engine = engine_of(runner, step_tokens=16, step_timeout_s=10)
    with engine._changed:
        slots = [engine.submit(request(str(i), prompt=[i] * 900, max_tokens=2)) for i in range(PROMPTS)]
    for slot in slots:
        assert isinstance(await outcome(slot), list)
