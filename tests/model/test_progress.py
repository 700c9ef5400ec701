"""A stream that steps pass by is noticed, and it is the engine that ends and not its reader's patience."""

import logging
import time

import pytest

from millrace.errors import HopBrokenError, NotReadyError
from services.predictor.engine.load.progress import ProgressWatch
from tests.model.crowd import dead, outcome
from tests.model.fakes import FakeRunner, engines, request
from tests.model.test_scheduler import added, scheduler_of, sequence, step


def test_one_that_every_step_passes_by_is_stuck_and_no_other():
    watch = ProgressWatch(10.0)
    served, passed_by = sequence(), sequence()
    for now in range(100, 111):
        assert watch.observe([served, passed_by], {served}, float(now)) is None
    assert watch.observe([served, passed_by], {served}, 111.0) is passed_by


def test_a_step_that_serves_it_or_in_which_it_is_not_due_begins_anew():
    watch = ProgressWatch(10.0)
    one = sequence()
    for now, (due, served) in zip(
        range(0, 1000, 9), [([one], ()), ([one], [one]), ([one], ()), ([], ())] * 20, strict=False
    ):
        assert watch.observe(due, set(served), float(now)) is None


def test_those_who_decode_and_the_oldest_are_due_and_who_runs_alone_is_due_alone():
    scheduler = scheduler_of(blocks=60, step_tokens=4)
    oldest, decoding, prompt = added(scheduler, sequence(1), sequence(1), sequence(30))
    step(scheduler)
    assert scheduler.due == [oldest, decoding]
    scheduler.remove(oldest)
    scheduler.remove(decoding)
    step(scheduler)
    assert scheduler.due == [prompt]
    (alone,) = added(scheduler, sequence(9, alone=True))
    step(scheduler)
    assert scheduler.due == [alone]


async def test_a_stream_without_progress_is_the_engines_end(caplog):
    with engines() as make, caplog.at_level(logging.CRITICAL):
        engine = make(FakeRunner(lambda _: time.sleep(0.001)), step_timeout_s=0.2)
        schedule = engine._scheduler.schedule

        def passing_by(prefill_tokens):
            return [row for row in schedule(prefill_tokens) if row.sequence.request.id != "stuck"]

        engine._scheduler.schedule = passing_by
        slots = [engine.submit(request(name, max_tokens=900)) for name in ("stuck", "beside")]
        # The one that took no part in any step is not what ended it.
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
