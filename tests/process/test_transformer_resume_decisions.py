"""The decisions of resume, without calls: how often, how long, and which requests are refused."""

import asyncio
from types import SimpleNamespace

import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineError, DrainingError, HopBrokenError, NotReadyError
from headrace.sampling import SamplingParameters
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.predictors.resume import retries as retries_module
from headrace_transformer.predictors.resume.progress import (
    CrashCount,
    NextCall,
    PredictorLostError,
    Quarantine,
    request_fingerprint,
)
from headrace_transformer.predictors.resume.retries import Backoff

SHARED, ALONE, NONE = NextCall.SHARED, NextCall.ISOLATED, NextCall.NONE
AWAY = NotReadyError("no predictor is ready")


@pytest.mark.parametrize(
    ("limit", "events", "next_call"),
    [
        (2, "", SHARED),
        (2, "d", SHARED),
        (2, "dd", ALONE),
        (2, "ddad", NONE),
        (2, "ddaed", ALONE),
        (2, "dddddd", ALONE),
        (2, "ddddddd", NONE),
        (2, "dtd", SHARED),
        (2, "ddtdd", ALONE),
        (2, "tdtdtdtd", SHARED),
        (1, "d", ALONE),
        (1, "dad", NONE),
        (3, "dddad", NONE),
        (2, "ddatddd", ALONE),
        # The loss of a predictor is half a crash, in isolation too.
        (2, "lll", SHARED),
        (2, "llll", ALONE),
        (2, "dll", ALONE),
        (2, "ddalal", NONE),
        (2, "lllltl", SHARED),
        (2, "lllllllllllll", NONE),
    ],
)
def test_only_crashes_in_a_row_count(limit, events, next_call):
    crashes = CrashCount(limit)
    happen = {
        "d": lambda: crashes.call_ended(HopBrokenError("the engine died")),
        "l": lambda: crashes.call_ended(PredictorLostError("the connection broke")),
        "e": lambda: crashes.call_ended(NotReadyError("it stops")),
        "a": crashes.isolated,
        "t": crashes.token,
    }
    for event in events:
        happen[event]()
    assert crashes.next_call is next_call


SAMPLING = SamplingParameters(max_tokens=10, seed=1)


def test_a_request_is_identified_by_everything_but_its_seed():
    def fingerprint(model="m", prompt_ids=(1, 2), **changes):
        submission = Submission(model=model, prompt_ids=prompt_ids)
        return request_fingerprint(submission, SAMPLING.model_copy(update=changes))

    known = fingerprint()
    assert fingerprint(seed=2) == known
    others = [fingerprint("n"), fingerprint(prompt_ids=[1, 3]), fingerprint(prompt_ids=[1]), fingerprint(max_tokens=11)]
    assert known not in others


def test_a_quarantined_request_is_refused_for_ten_minutes():
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    assert not quarantine
    quarantine.add(b"a")
    now[0] = 599
    quarantine.add(b"b")
    assert (quarantine.refuses(b"a"), quarantine.refuses(b"b"), quarantine.refuses(b"c")) == (True, True, False)
    now[0] = 600
    assert (quarantine.refuses(b"a"), quarantine.refuses(b"b")) == (False, True)
    now[0] = 1199
    assert not quarantine.refuses(b"b")
    assert not quarantine


def test_the_oldest_quarantine_is_forgotten_first():
    quarantine = Quarantine()
    for number in range(1025):
        quarantine.add(str(number).encode())
    assert not quarantine.refuses(b"0")
    assert quarantine.refuses(b"1")


def retries(wait_s, timeout_s=None, start_wait_s=None):
    return Backoff(Deadline.after(timeout_s), wait_s, start_wait_s)


async def tries(backoff, count, retry_after_ms=None):
    for _ in range(count):
        await backoff.pause(AWAY, retry_after_ms)


@pytest.fixture
def slept(monkeypatch):
    """The requested pauses, which take no time.

    Only the tested module gets this `sleep`: the stacks of other tests run on the same event loop.
    """
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(retries_module, "asyncio", SimpleNamespace(sleep=sleep))
    return pauses


async def test_the_first_try_is_immediate_and_the_next_ones_back_off(slept):
    await tries(retries(30), 9)
    longest = [0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert all(most / 2 <= pause <= most for pause, most in zip(slept, longest, strict=True))


async def test_a_begun_answer_waits_longer_than_an_unbegun_one():
    with pytest.raises(NotReadyError):
        await tries(retries(30, start_wait_s=0.05), 1000)
    backoff = retries(30, start_wait_s=0.05)
    backoff.answer_began()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await tries(backoff, 1000)


async def test_an_answer_makes_the_next_try_immediate_again(slept):
    backoff = retries(30)
    await tries(backoff, 5)
    backoff.reset()
    await tries(backoff, 1)
    assert slept[-1] == 0


async def test_no_pause_is_longer_than_the_time_left(slept):
    await tries(retries(30), 1, 60_000)
    await tries(retries(30, timeout_s=5), 1, 60_000)
    assert slept == [pytest.approx(30, abs=1), pytest.approx(5, abs=1)]


async def test_a_wait_for_a_draining_predictor_ends_as_not_ready():
    draining = DrainingError("the predictor stops", hop="predictor")
    with pytest.raises(NotReadyError, match="the predictor stops") as raised:
        await retries(0).pause(draining)
    assert type(raised.value) is NotReadyError
    assert raised.value.hop == "predictor"


async def test_a_change_ends_a_wait_and_without_one_it_ends_with_the_error():
    changed = asyncio.Event()
    waiting = asyncio.create_task(retries(30).wait_for(changed, AWAY))
    await asyncio.sleep(0)
    changed.set()
    await waiting
    with pytest.raises(NotReadyError):
        await retries(0.05).wait_for(asyncio.Event(), AWAY)
    with pytest.raises(DeadlineError):
        await retries(30, timeout_s=0.05).wait_for(asyncio.Event(), AWAY)


async def test_the_wait_for_an_isolated_turn_ends_with_the_deadline():
    turn = asyncio.Lock()
    await turn.acquire()
    with pytest.raises(DeadlineError):
        await retries(30, timeout_s=0.05).acquire(turn)
    turn.release()
    await retries(0.05).acquire(turn)
    assert turn.locked()


async def test_waiting_for_other_requests_does_not_count_as_waiting_for_a_predictor():
    backoff, turn = retries(0.2), asyncio.Lock()
    await backoff.pause(AWAY)
    await turn.acquire()
    asyncio.get_running_loop().call_later(0.4, turn.release)
    await backoff.acquire(turn)
    await backoff.pause(AWAY)  # Otherwise the limit would have been reached.
