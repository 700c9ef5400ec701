"""An isolated request has the engine to itself until its next token; the others lose only that time."""

import pytest

from headrace.errors import InvalidRequestError, NotReadyError, RequestFailedError
from headrace_predictor.engine_process.step_frames import StepFrames
from tests.model.fakes import (
    FakeRunner,
    Gate,
    assert_crowd_is_unharmed,
    expected,
    outcome,
    read_all,
    request,
    submit_crowd,
)
from tests.support.in_process_engine import submit
from tests.waiting import until

LONG = range(3, 43)


def submit_with_frames(engine):
    """Submits an isolated request whose caller has to be notified; returns what the process sends, and the output."""
    sent = []
    output = StepFrames(sent.append).add((1, 2))
    engine.generate(request("alone", prompt=LONG, alone=True), output)
    return sent, output


def names_of(steps):
    return [{name for name, _, _ in step} for step in steps]


async def test_an_engine_accepts_one_isolated_request_at_a_time(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate))
    first = submit(engine, request("first", alone=True))
    with pytest.raises(NotReadyError, match="another request runs in isolation here") as raised:
        submit(engine, request("second", alone=True))
    assert raised.value.retry_after_ms == 100
    # Requests that are not isolated are accepted.
    other = submit(engine, request())
    gate.open(1)
    await first.read()
    second = submit(engine, request("second", alone=True))
    gate.open(1000)
    for slot in (other, second):
        assert (await read_all(slot))[0] == expected((5, 6))
    await read_all(first)


async def test_a_refused_isolated_request_does_not_keep_the_place(engine_of):
    engine = engine_of(FakeRunner(blocks=4))
    with pytest.raises(InvalidRequestError):
        submit(engine, request("too long", prompt=LONG, alone=True))
    assert (await read_all(submit(engine, request(max_tokens=2, alone=True))))[0] == expected((5, 6), 2)


@pytest.mark.parametrize("how", ["cancel", "fail"])
async def test_an_isolated_request_that_ends_before_its_caller_is_notified_is_not_computed(engine_of, monkeypatch, how):
    monkeypatch.setattr("headrace_predictor.engine.engine._NOTIFY_S", 30)
    runner = FakeRunner()
    engine = engine_of(runner, max_running=16, max_waiting=32)
    sent, alone = submit_with_frames(engine)
    await until(lambda: sent)
    if how == "cancel":
        alone.cancel()
    else:
        alone.fail(NotReadyError("handed back"))
    slots = submit_crowd(engine)
    await assert_crowd_is_unharmed(slots)
    assert not any("alone" in names for names in names_of(runner.steps))
    assert engine.load.blocks_in_use == 0
    assert (await read_all(submit(engine, request("next", alone=True))))[0] == expected((5, 6))


async def test_an_isolated_request_that_fails_harms_no_other_and_gives_its_place_back(engine_of):
    def before(row):
        if row.sequence.id == "alone":
            raise RuntimeError("poison")

    engine = engine_of(FakeRunner(before), max_running=16, max_waiting=32, step_tokens=16)
    slots = submit_crowd(engine)
    assert await outcome(submit(engine, request("alone", prompt=LONG, alone=True))) is RequestFailedError
    await assert_crowd_is_unharmed(slots)
    assert (await read_all(submit(engine, request("next", alone=True))))[0] == expected((5, 6))


async def test_an_isolated_request_is_computed_after_its_caller_is_notified(engine_of, monkeypatch):
    monkeypatch.setattr("headrace_predictor.engine.engine._NOTIFY_S", 30)
    runner = FakeRunner()
    engine = engine_of(runner, step_tokens=16)
    sent, alone = submit_with_frames(engine)
    await until(lambda: sent)
    assert not runner.steps
    alone.reported()
    await until(lambda: engine.statistics.succeeded)
    # One notification, though its prompt takes several steps.
    assert len(runner.steps) > 12
    (announcement,) = sent
    assert [(key.channel, key.number) for key in announcement.alone] == [(1, 2)]
