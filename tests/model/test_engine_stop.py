"""Hanging steps, close, cancels, deadlines and lost readers: everything ends, and no reader waits for ever."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from headrace.errors import HopBrokenError, NotReadyError, RequestFailedError
from tests.model.fakes import FakeRunner, Gate, dead, expected, outcome, read_all, request, submit_crowd
from tests.support.in_process_engine import submit
from tests.waiting import until


@pytest.fixture
def hanging():
    """A model that hangs at "stuck" until the end of the test."""
    release, hangs = threading.Event(), threading.Event()

    def before(row):
        if row.sequence.id == "stuck" and row.sequence.output_ids:
            hangs.set()
            release.wait(60)

    runner = FakeRunner(before)
    runner.hangs = hangs
    yield runner
    release.set()


async def test_a_step_that_hangs_ends_the_engine(engine_of, hanging, caplog, capfd):
    # The fixture that closes the engine is torn down before the step is released: close may not hang either.
    engine = engine_of(hanging, max_running=2, step_timeout_s=1)
    slots = [submit(engine, request(name)) for name in ("stuck", "beside", "waiting")]
    with caplog.at_level(logging.CRITICAL):
        outcomes = [await outcome(slot) for slot in slots]
    assert outcomes == [HopBrokenError, HopBrokenError, NotReadyError]
    await dead(engine)
    [line] = [record.getMessage() for record in caplog.records if "a step takes longer" in record.getMessage()]
    assert "['stuck', 'beside', 'waiting']" in line
    assert "in before" in capfd.readouterr().err


async def test_a_step_that_hangs_ends_the_engine_even_without_standard_error(engine_of, hanging, monkeypatch):
    def closed(**_):
        raise RuntimeError("lost sys.stderr")

    monkeypatch.setattr("faulthandler.dump_traceback", closed)
    engine = engine_of(hanging, step_timeout_s=1)
    assert await outcome(submit(engine, request("stuck"))) is HopBrokenError
    await dead(engine)


async def test_each_repeated_row_has_the_time_limit_of_a_step(engine_of, monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
    monkeypatch.setattr("headrace.rpc.server.watchdog.time", clock)

    def before(row):
        # By the watchdog's clock nine rows take less than a step's limit, but four and then nine do not. The watchdog
        # checks every 5 ms of real time.
        now[0] += 0.002
        time.sleep(0.01)
        if row.sequence.id == "3" and row.sequence.output_ids:
            raise RuntimeError("poison")

    engine = engine_of(FakeRunner(before), max_running=9, step_timeout_s=0.02, max_waiting=32)
    slots = submit_crowd(engine, max_tokens=3)
    outcomes = [await outcome(slot) for slot in slots]
    assert outcomes.pop(3) is RequestFailedError
    assert HopBrokenError not in outcomes


async def test_close_ends_requests_in_flight_even_in_a_step_that_hangs(engine_of, hanging, monkeypatch):
    monkeypatch.setattr("headrace_predictor.engine.engine._STOP_TIMEOUT_S", 0.1)
    engine = engine_of(hanging, max_running=2)
    slots = [submit(engine, request(name)) for name in ("stuck", "beside", "waiting")]
    await until(hanging.hangs.is_set)
    await asyncio.to_thread(engine.close)
    for slot in slots:
        assert await outcome(slot) is NotReadyError
    with pytest.raises(NotReadyError):
        submit(engine, request("late"))


async def test_a_request_that_is_submitted_while_the_engine_closes_ends(engine_of):
    engine = engine_of(FakeRunner(), max_running=4, max_waiting=10_000)
    slots, refused, loop = [], threading.Event(), asyncio.get_running_loop()

    def keep_submitting():
        while not refused.wait(0.0005):
            try:
                slots.append(submit(engine, request("x", max_tokens=2), loop))
            except NotReadyError:
                refused.set()

    threads = [threading.Thread(target=keep_submitting) for _ in range(3)]
    for thread in threads:
        thread.start()
    await until(lambda: len(slots) > 20)
    await asyncio.to_thread(engine.close)
    for thread in threads:
        thread.join(10)
    for slot in slots:
        assert await outcome(slot) in (NotReadyError, expected((5, 6), 2))


async def test_cancel_in_the_middle_of_a_prompt_ends_it_there(engine_of):
    gate = Gate()
    runner = FakeRunner(gate)
    engine = engine_of(runner, step_tokens=16)
    slot = submit(engine, request(prompt=range(60)))
    gate.open(1)
    await until(lambda: len(runner.steps) == 2)
    slot.cancel()
    slot.cancel()
    gate.open(1)
    assert await outcome(slot) is RequestFailedError
    assert engine.load.blocks_in_use == 0
    assert len(runner.steps) == 2


async def test_a_reader_that_is_cancelled_loses_nothing(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate))
    slot = submit(engine, request(chunk_tokens=4))
    reading = asyncio.create_task(slot.read())
    gate.open(2)
    await until(lambda: engine.statistics.tokens == 2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    gate.open(1000)
    assert (await read_all(slot))[0] == expected((5, 6))


async def test_an_ended_slot_keeps_its_end(engine_of):
    engine = engine_of(FakeRunner())
    slot = submit(engine, request())
    ids, _ = await read_all(slot)
    slot.cancel()
    slot.fail(NotReadyError("too late"))
    assert slot.publish(3, None) is None
    assert ((await slot.read()).finish_reason, len(ids)) == ("length", 12)


async def test_tokens_before_an_error_are_still_read(engine_of):
    gate = Gate()
    engine = engine_of(FakeRunner(gate))
    slot = submit(engine, request(max_tokens=100))
    gate.open(3)
    await until(lambda: engine.statistics.tokens == 3)
    slot.fail(NotReadyError("the engine stopped"))
    assert (await slot.read()).output_ids == expected((5, 6), 3)
    with pytest.raises(NotReadyError):
        await slot.read()
    slot.cancel()
    gate.open(1)


PROMPTS = 3


@pytest.fixture
def slow_runner(clock):
    def before(_):
        clock[0] += 1.0

    return FakeRunner(before)


async def test_a_stream_without_progress_ends_the_engine(engine_of, slow_runner, caplog):
    engine = engine_of(slow_runner, step_timeout_s=10)
    schedule = engine._scheduler.schedule

    def passing_by(*arguments):
        return [row for row in schedule(*arguments) if row.sequence.id != "stuck"]

    engine._scheduler.schedule = passing_by
    with caplog.at_level(logging.CRITICAL):
        slots = [submit(engine, request(name, max_tokens=900)) for name in ("stuck", "beside")]
        # A request that took no part in any step is not to blame.
        assert [await outcome(slot) for slot in slots] == [NotReadyError, HopBrokenError]
        await dead(engine)
    assert "request stuck gets no token" in caplog.text


async def test_a_prompt_that_waits_for_older_ones_is_not_stuck(engine_of, slow_runner):
    engine = engine_of(slow_runner, step_tokens=16, step_timeout_s=10)
    with engine._changed:
        slots = [submit(engine, request(str(i), prompt=[i] * 900, max_tokens=2)) for i in range(PROMPTS)]
    for slot in slots:
        assert isinstance(await outcome(slot), list)
