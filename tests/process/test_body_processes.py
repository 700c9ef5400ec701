"""Large bodies are read in other processes: bounded in bytes, within the deadline, each failing alone."""

import asyncio
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import orjson
import psutil
import pytest
import pytest_asyncio
import uvloop

from headrace.deadline import Deadline
from headrace.errors import DeadlineError, InvalidRequestError, OverloadedError, RequestFailedError, TooLargeError
from headrace_transformer.frontends.openai.errors import UnsupportedFieldError
from headrace_transformer.processes.body_processes import LARGE_BYTES, TEMPLATES, BodyProcesses
from tests.waiting import until


def process_id(body):
    return os.getpid(), body


def refuse(body, kind):
    if kind == "unsupported":
        raise UnsupportedFieldError("tools", [1])
    if kind == "unforeseen":
        raise LookupError("secret")
    raise InvalidRequestError("no", param="x")


def answer_nested(body):
    nested = []
    for _ in range(900):
        nested = [nested]
    return nested, b""


def limits(body):
    with open("/proc/self/oom_score_adj") as score:
        return (resource.getrlimit(resource.RLIMIT_DATA)[0], int(score.read())), b""


def end(body, number):
    os.kill(os.getpid(), number)
    time.sleep(60)
    return None, b""


def wait(body, path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return None, body


def repeat(body, times):
    return times, body * times


def load(body):
    return len(orjson.loads(body)), b""


def allocate(body, size):
    return len(bytearray(size)), b""


def spin(body, seconds):
    signal.setitimer(signal.ITIMER_PROF, seconds)
    while True:
        pass


@pytest_asyncio.fixture(scope="module")
async def processes():
    """Shared: a call that ends its process, or is given up, leaves the next one a new process."""
    made = BodyProcesses(max_bytes=3 * LARGE_BYTES)
    yield made
    await made.close()


def children():
    return [child for child in psutil.Process().children() if "body_worker" in " ".join(command_of(child))]


def command_of(process):
    """The command line; empty for a process that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # A zombie too.
        return []


async def test_work_runs_in_another_process_and_returns_its_bytes_unchanged(processes):
    body = os.urandom(3_000_000)
    first, back = await processes.run(process_id, (), body)
    assert (first != os.getpid(), back == body) == (True, True)
    again, _ = await processes.run(process_id, (), b"x")
    other, _ = await processes.run(process_id, (), bytes(LARGE_BYTES + 1))
    assert (again == first, other != first) == (True, True)


async def test_the_processes_are_reused_and_give_memory_back(processes, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1073741824")
    await processes.run(process_id, (), b"x")
    await processes.run(process_id, (), bytes(LARGE_BYTES + 1))
    own = psutil.Process().nice()
    assert [child.nice() for child in children()] == [min(own + 5, 19)] * 2
    assert not any("MALLOC_TRIM_THRESHOLD_" in child.environ() for child in children())


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("", InvalidRequestError, "no"),
        ("unsupported", UnsupportedFieldError, "tools"),
        ("unforeseen", RequestFailedError, "internal error"),
    ],
)
async def test_an_error_of_the_work_is_raised_in_the_caller(processes, kind, error, text):
    with pytest.raises(error, match=text) as raised:
        await processes.run(refuse, (kind,), b"")
    assert type(raised.value) is error
    if kind == "":
        assert raised.value.param == "x"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, RequestFailedError), (signal.SIGSEGV, TooLargeError)])
async def test_the_end_of_a_process_fails_only_its_own_call(processes, number, error):
    first, waiting = await asyncio.gather(
        processes.run(end, (number,), b""), processes.run(process_id, (), b"next"), return_exceptions=True
    )
    assert isinstance(first, error)
    assert waiting[1] == b"next"


async def test_the_end_of_an_idle_process_fails_no_call(processes):
    before, _ = await processes.run(process_id, (), b"")
    os.kill(before, signal.SIGKILL)
    await until(lambda: psutil.Process(before).status() == psutil.STATUS_ZOMBIE)
    after, _ = await processes.run(process_id, (), b"")
    assert after != before


async def test_a_body_that_takes_too_much_memory_or_time_is_refused(processes):
    with pytest.raises(TooLargeError):
        await processes.run(allocate, (2 * 1024**3,), b"")
    with pytest.raises(TooLargeError):
        await processes.run(spin, (0.1,), b"")
    assert (await processes.run(load, (), b"[1,2]"))[0] == 2


async def test_bytes_beyond_the_bound_are_refused_until_there_is_room(processes, tmp_path):
    gate = tmp_path / "gate"
    body = bytes(LARGE_BYTES)
    waiting = [asyncio.create_task(processes.run(wait, (str(gate),), body)) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=r"at most 256, and \d+ bytes") as caught:
            await processes.run(wait, (str(gate),), body)
        assert caught.value.retry_after_ms
        # A cancelled call makes room in the queue.
        waiting[-1].cancel()
        await asyncio.gather(waiting[-1], return_exceptions=True)
        waiting[-1] = asyncio.create_task(processes.run(wait, (str(gate),), body))
        await asyncio.sleep(0)
        assert not waiting[-1].done()
    finally:
        gate.touch()
    assert [data for _, data in await asyncio.gather(*waiting)] == [body] * 3


async def test_one_caller_has_half_of_the_bytes(processes, tmp_path, monkeypatch):
    gate, body = tmp_path / "gate", bytes(LARGE_BYTES)
    caller = "greedy"
    monkeypatch.setattr("headrace.rpc.limits.admission.caller_of_call", lambda: caller)
    waiting = [asyncio.create_task(processes.run(wait, (str(gate),), body))]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await processes.run(wait, (str(gate),), body)
    caller = "other"
    waiting.append(asyncio.create_task(processes.run(wait, (str(gate),), body)))
    await asyncio.sleep(0)
    gate.touch()
    assert [data for _, data in await asyncio.gather(*waiting)] == [body] * 2
    caller = "greedy"
    assert (await processes.run(process_id, (), body))[1] == body


async def test_a_body_that_cannot_be_passed_on_is_refused_and_takes_no_place(processes):
    nested = []
    for _ in range(900):
        nested = [nested]
    for _ in range(300):
        with pytest.raises(InvalidRequestError, match="nested too deep"):
            await processes.run(process_id, (nested,), bytes(LARGE_BYTES))
    with pytest.raises(InvalidRequestError, match="nested too deep"):
        await processes.run(answer_nested, (), b"")
    assert (await processes.run(process_id, (), bytes(LARGE_BYTES)))[1] == bytes(LARGE_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")
async def test_each_process_has_its_own_limits_and_ends_before_its_parent(processes):
    (small, first), _ = await processes.run(limits, (), b"")
    (large, _), _ = await processes.run(limits, (), bytes(LARGE_BYTES + 1))
    (templates, _), _ = await processes.run(limits, (), b"", lane=TEMPLATES)
    assert (small, large, templates) == (512 << 20, 1536 << 20, 512 << 20)
    assert first == 1000


async def test_a_wait_ends_with_the_deadline(processes, tmp_path):
    with pytest.raises(DeadlineError):
        await processes.run(wait, (str(tmp_path / "gate"),), b"", Deadline.after(0.01))
    (tmp_path / "gate").touch()


async def test_small_calls_to_a_process_that_waits_keep_their_own_results(processes, tmp_path):
    """Such a call needs no thread, unless it is given up, its result is large, or the process ends."""
    first, _ = await processes.run(process_id, (), b"first")
    given_up = asyncio.create_task(processes.run(wait, (str(tmp_path / "gate"),), b"", Deadline.after(0.1)))
    waiting = [asyncio.create_task(processes.run(process_id, (), b"%d" % number)) for number in range(3)]
    with pytest.raises(DeadlineError):
        await given_up
    (tmp_path / "gate").touch()
    assert await asyncio.gather(*waiting) == [(first, b"%d" % number) for number in range(3)]
    for times in (1, 1_000, 1_000_000):
        assert await processes.run(repeat, (times,), b"abc") == (times, b"abc" * times)
    with pytest.raises(InvalidRequestError, match="no"):
        await processes.run(refuse, ("",), b"")
    for number, error in ((signal.SIGKILL, RequestFailedError), (signal.SIGSEGV, TooLargeError)):
        before, _ = await processes.run(process_id, (), b"")
        with pytest.raises(error):
            await processes.run(end, (number,), b"")
        assert (await processes.run(process_id, (), b"after"))[1] == b"after"
        assert not psutil.pid_exists(before)


def test_calls_at_the_same_time_keep_their_own_results():
    """Some are given to the process by the loop, which is that of the transformer, others by the thread."""

    async def main():
        processes = BodyProcesses()

        async def each_once(caller):
            for number in range(100):
                body = b"%d of %d" % (number, caller)
                assert await processes.run(repeat, (1,), body) == (1, body)
                await asyncio.sleep(0.0005 * caller)

        await asyncio.gather(*(each_once(caller) for caller in range(4)))
        await processes.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_long_prompt_does_not_wait_for_a_large_tensor(processes, tmp_path):
    gate = tmp_path / "gate"
    large = asyncio.create_task(processes.run(wait, (str(gate),), bytes(LARGE_BYTES + 1)))
    try:
        assert (await processes.run(process_id, (), b"prompt"))[1] == b"prompt"
        assert not large.done()
    finally:
        gate.touch()
    await large


async def test_the_processes_end_with_their_parent(tmp_path):
    processes, others = BodyProcesses(), set(children())
    await processes.run(process_id, (), b"")
    busy = asyncio.create_task(processes.run(wait, (str(tmp_path / "never"),), bytes(LARGE_BYTES + 1)))
    await until(lambda: len(set(children()) - others) >= 2)
    await processes.close()
    with suppress(RequestFailedError):
        await busy
    await until(lambda: not set(children()) - others)
