"""The load of the transport benchmark: callers in separate processes, the same for every contender.

    async with clients(2) as load_clients:
        load = await load_clients.measure(target, "tok", begin, end)

Each of a case's callers sends its next request when it has an answer. Requests are serialized once; answers stay
bytes, and each is compared with its request (tensor_cases.py). Callers start at once and end after `end`; they count
the calls that end from `begin` to `end`, both of the monotonic clock, which all processes share. A process has one gRPC
channel, or one HTTP connection for each caller.

`python -m bench.tensor_client` is such a process: a measurement as a line of JSON on stdin, its load on stdout.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import grpc
import uvloop

from bench.contenders import ROOT
from bench.processes import roles, usage
from bench.tensor_cases import CASES, INFER, STREAM_INFER, Case, Comparison

GRPC, REST = "grpc", "rest"

_WARM_UP_S = 0.5
_TIMEOUT_S = 60.0
_LINE_LIMIT = 64 << 20
_WRONG = "wrong answer"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class Target(NamedTuple):
    """A model of a running server; `protocol` is GRPC or REST, `address` host:port."""

    protocol: str
    address: str
    model: str


@dataclass
class Load:
    """The calls that ended within a measurement; `first_s` is the time to the first message of each stream."""

    took_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    messages: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    client_cpu_s: float = 0.0

    def add(self, other: "Load") -> None:
        self.took_s += other.took_s
        self.first_s += other.first_s
        self.messages += other.messages
        self.failures = dict(Counter(self.failures) + Counter(other.failures))
        self.client_cpu_s += other.client_cpu_s


class Clients:
    """Several load processes."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def measure(self, target: Target, case: str, begin: float, end: float) -> Load:
        """Runs the callers of a case, distributed over the processes; raises RuntimeError if a process ends."""
        total = CASES[case].callers
        count = min(len(self._processes), total)
        shares = [total // count + (number < total % count) for number in range(count)]
        loads = await asyncio.gather(
            *(
                _ask(process, {"target": target, "case": case, "callers": share, "begin": begin, "end": end})
                for process, share in zip(self._processes, shares, strict=False)
            )
        )
        whole = Load()
        for load in loads:
            whole.add(load)
        return whole

    async def measure_with_usage(
        self, target: Target, case: str, roots: Mapping[str, int], seconds: float
    ) -> tuple[Load, dict[str, float]]:
        """Like `measure`, after a warm-up; also returns the processor time of the server's processes, by role."""
        processes = roles(roots)
        begin = time.monotonic() + _WARM_UP_S
        load = asyncio.create_task(self.measure(target, case, begin, begin + seconds))
        await asyncio.sleep(begin - time.monotonic())
        before = usage(processes)
        await asyncio.sleep(begin + seconds - time.monotonic())
        used = usage(processes).since(before).processes
        return await load, used


@asynccontextmanager
async def clients(count: int) -> AsyncIterator[Clients]:
    """Starts the processes; they end with this one, because their stdin does."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.tensor_client"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        for _ in range(count)
    ]
    try:
        yield Clients(processes)
    finally:
        for process in processes:
            process.stdin.close()  # type: ignore[union-attr]
        await asyncio.gather(*(process.wait() for process in processes))


async def _ask(process: asyncio.subprocess.Process, measurement: dict[str, Any]) -> Load:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a load process has no pipes")
    process.stdin.write(json.dumps(measurement).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a load process ended")
    return Load(**json.loads(line))


# ------------------------------------------------------------------ in a load process


class Call(NamedTuple):
    """One call's outcome: "" or why it failed, and the times of its messages."""

    failure: str
    messages: list[float]


Ask = Callable[[], Awaitable[Call]]


async def _measure(target: Target, case: Case, callers: int, begin: float, end: float) -> Load:
    load = Load()

    async def call_again_and_again(ask: Ask) -> None:
        while (started := time.monotonic()) < end:
            call = await ask()
            now = time.monotonic()
            load.messages += sum(begin <= at < end for at in call.messages)
            if not begin <= now < end and not call.failure:
                continue
            if call.failure:
                load.failures[call.failure] = load.failures.get(call.failure, 0) + 1
                continue
            load.took_s.append(now - started)
            load.first_s += [at - started for at in call.messages[:1]]

    async def processor_time() -> float:
        await asyncio.sleep(begin - time.monotonic())
        before = _cpu_s()
        await asyncio.sleep(end - time.monotonic())
        return _cpu_s() - before

    async with AsyncExitStack() as opened, asyncio.TaskGroup() as group:
        comparison = Comparison(case)
        spent = group.create_task(processor_time())
        if target.protocol == GRPC:
            channel = await opened.enter_async_context(grpc.aio.insecure_channel(target.address, options=_OPTIONS))
            make = _stream if case.streams else _unary
            asks = [make(channel, case.request(target.model), comparison)] * callers
        else:
            asks = [await _rest(opened, target, case, comparison) for _ in range(callers)]
        for ask in asks:
            group.create_task(call_again_and_again(ask))
    load.client_cpu_s = spent.result()
    return load


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _unary(channel: grpc.aio.Channel, request: bytes, comparison: Comparison) -> Ask:
    infer: Any = channel.unary_unary(INFER)

    async def ask() -> Call:
        try:
            answer = await infer(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return Call(f"{error.code().name}: {error.details()}"[:200], [])
        return Call("" if comparison.is_right(answer) else _WRONG, [])

    return ask


def _stream(channel: grpc.aio.Channel, request: bytes, comparison: Comparison) -> Ask:
    infer: Any = channel.stream_stream(STREAM_INFER)

    async def ask() -> Call:
        answers, times = [], []
        try:
            call = infer(timeout=_TIMEOUT_S)
            await call.write(request)
            await call.done_writing()
            while (answer := await call.read()) is not grpc.aio.EOF:
                times.append(time.monotonic())
                answers.append(answer)
        except grpc.aio.AioRpcError as error:
            return Call(f"{error.code().name}: {error.details()}"[:200], times)
        return Call("" if comparison.are_right(answers) else _WRONG, times)

    return ask


async def _rest(opened: AsyncExitStack, target: Target, case: Case, comparison: Comparison) -> Ask:
    host, _, port = target.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=_LINE_LIMIT)
    opened.callback(writer.close)
    body = case.json_request()
    head = (
        f"POST /v2/models/{target.model}/infer HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()

    async def ask() -> Call:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.writelines((head, body))
            first, _, headers = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            lengths = [
                line.partition(b":")[2] for line in headers.lower().split(b"\r\n") if line[:15] == b"content-length:"
            ]
            answer = await reader.readexactly(int(lengths[0]))
        if first.split(b" ")[1] != b"200":
            return Call(f"{first.decode()}: {answer[:200].decode(errors='replace')}", [])
        return Call("" if comparison.is_right_json(answer) else _WRONG, [])

    return ask


async def _serve() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        measurement = json.loads(line)
        target, case = Target(*measurement.pop("target")), CASES[measurement.pop("case")]
        print(json.dumps(asdict(await _measure(target, case, **measurement))), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(_serve())
