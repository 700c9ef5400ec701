"""The payload log's capacity: records committed a second, and the first page of each query.

A separate logger, with its own file on this machine. `append`: records of 4 KB, sent as by the transformer, by as
many senders, until the last is acknowledged; the aim is at least 5,000 a second, on two cores shared with the senders.
`query`: a file of 1,000,000 small records, and for each filter alone the first page of 100, until its last record is at
the client; the aim is at most 50 ms at the 95th percentile. `usage`: the sums of as many records of 100 clients, spread
over 30 days, by client and model, by day, and of one client; the aim is the same for the last. `tap`: the event loop's
time for a chunk while the threads behind the tap write and ship; the aim is at most 20 us at the 99th percentile.

`python -m bench.payload_store` writes bench/results/payload_store.json; 6 minutes and 3 GB of temporary files.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.runs import parser, write
from bench.statistics import quantile
from headrace.payload.parts import Begin
from headrace.payload.records import as_uuid7, next_id
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import (
    AppendRequest,
    AppendResponse,
    PayloadChunk,
    PayloadRecord,
    QueryPayloadsRequest,
    Usage,
    UsageRequest,
)
from tests.support.free_ports import free_settings
from tests.support.payload_ingest import tap_of

_ROOT = Path(__file__).resolve().parent.parent
_AIMS = {"append_records_a_second": 5000, "query_p95_ms": 50, "usage_of_one_client_p95_ms": 50, "tap_chunk_p99_us": 20}
_PAGE = 100
_STATUSES = ("OK",) * 17 + ("CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED")
_MODELS = ("storyteller",) * 8 + ("normalizer", "digits")
_IN_FLIGHT = 1024
_MONTH_US = 30 * 24 * 3600 * 1_000_000
_USAGE: dict[str, dict[str, str]] = {
    "by_client_and_model": {},
    "by_day": {"group": "day"},
    "one_client": {"client": "client-7", "group": ""},
}
_OPEN, _CHUNKS, _PACE_S = 32, 400, 0.01


def main() -> None:
    options = parser(__doc__, "payload_store")
    options.add_argument("--appended", type=int, default=60_000, help="records of 4 KB")
    options.add_argument("--senders", type=int, default=2)
    options.add_argument("--kept", type=int, default=1_000_000, help="records that are queried")
    options.add_argument("--queries", type=int, default=100, help="by each filter")
    options.add_argument(
        "--only", choices=("append", "query", "usage", "tap"), help="the others stay as the file has them"
    )
    arguments = options.parse_args()
    parts: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
        "append": lambda: _append(arguments.appended, arguments.senders),
        "query": lambda: _query(arguments.kept, arguments.queries),
        "usage": lambda: _usage(arguments.kept, arguments.queries),
        "tap": _tap,
    }
    report = json.loads(arguments.out.read_text()) if arguments.only else {}
    report.pop("date", None)
    report["aims"] = _AIMS
    for name in [arguments.only] if arguments.only else parts:
        report[name] = asyncio.run(parts[name]())
    write(arguments.out, report)
    print(json.dumps(report, indent=2))


@asynccontextmanager
async def _logger() -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    """The address of a new logger with an empty file, and a channel to it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = free_settings(Path(folder))
        environment = os.environ | {
            "LOGGER_PORT": str(settings.logger_port),
            "LOGGER_METRICS_PORT": "0",
            "LOGGER_DATABASE": str(Path(folder) / "payloads.sqlite3"),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace_logger", cwd=_ROOT, env=environment
        )
        try:
            target = f"127.0.0.1:{settings.logger_port}"
            async with grpc.aio.insecure_channel(target) as channel:
                request = health_pb2.HealthCheckRequest(service="headrace.v1.PayloadLog")
                await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=30)
                yield target, channel
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _append(count: int, senders: int) -> dict[str, Any]:
    async with _logger() as (_, channel):
        each = count // senders
        ready = [list(_requests(f"sender-{sender}", each, 4096)) for sender in range(senders)]
        size = len(ready[0][0])
        started = time.monotonic()
        await asyncio.gather(*(_send(channel, requests, each) for requests in ready))
        seconds = time.monotonic() - started
    return {"records": each * senders, "bytes_each": size, "records_a_second": round(each * senders / seconds)}


async def _send(channel: grpc.aio.Channel, requests: Iterable[bytes], count: int) -> None:
    """Sends like the tap's shipper, with a bounded number of unacknowledged records."""
    call = channel.stream_stream("/headrace.v1.PayloadIngest/Append", response_deserializer=AppendResponse.FromString)()
    room = asyncio.Semaphore(_IN_FLIGHT)
    acknowledged = 0

    async def read() -> None:
        nonlocal acknowledged
        async for response in call:
            for _ in range(response.sequence - acknowledged):
                room.release()
            acknowledged = response.sequence
            if acknowledged == count:
                return

    reader = asyncio.create_task(read())
    for request in requests:
        await room.acquire()
        await call.write(request)
    await call.done_writing()
    await reader


def _requests(source: str, count: int, text_bytes: int, apart_us: int = 10_000) -> Iterator[bytes]:
    """Serialized AppendRequests of one source, with records so far apart."""
    dice = random.Random(source)  # noqa: S311
    record_id, now_us = 0, time.time_ns() // 1000 - count * apart_us
    text = "x" * (text_bytes // 3)  # A third each for the prompt, the answer and its one chunk.
    for sequence in range(1, count + 1):
        now_us += apart_us
        record_id = next_id(now_us // 1000, record_id)
        record = PayloadRecord(
            record_id=str(as_uuid7(record_id)),
            request_id=f"{source}-{sequence}",
            model=dice.choice(_MODELS),
            protocol="headrace.v1.TextGeneration/Generate",
            prompt=text or "Once upon a time",
            text=text or "there was a fox.",
            status=dice.choice(_STATUSES),
            finish_reason=dice.choice(("stop", "length")),
            ttft_ms=dice.expovariate(1 / 30),
            duration_ms=dice.expovariate(1 / 500),
            trace_id=f"{dice.getrandbits(128):032x}",
            client=f"client-{dice.randrange(100)}",
            usage=Usage(prompt_tokens=dice.randrange(1000), completion_tokens=4),
            chunks=[PayloadChunk(offset_ms=30, text=text or "there was a fox.", token_ids=range(4))],
        )
        record.time.FromMicroseconds(now_us)
        yield AppendRequest(source=source, sequence=sequence, record=record).SerializeToString()


async def _query(count: int, queries: int) -> dict[str, Any]:
    async with _logger() as (_, channel):
        await _send(channel, _requests("kept", count, 0), count)
        stub = headrace_pb2_grpc.PayloadLogStub(channel)
        some = [record async for record in stub.Query(QueryPayloadsRequest(page_size=1000))]
        report: dict[str, Any] = {"records": count, "queries_by_each": queries}
        for name, filters in _filters(some, queries).items():
            times = []
            for request in filters:
                started = time.monotonic()
                async for _ in stub.Query(QueryPayloadsRequest(page_size=_PAGE, **request)):
                    pass
                times.append((time.monotonic() - started) * 1000)
            report[name] = {"median_ms": round(quantile(times, 0.5), 2), "p95_ms": round(quantile(times, 0.95), 2)}
        return report


async def _usage(count: int, queries: int) -> dict[str, Any]:
    async with _logger() as (_, channel):
        await _send(channel, _requests("used", count, 0, _MONTH_US // count), count)
        stub = headrace_pb2_grpc.PayloadLogStub(channel)
        report: dict[str, Any] = {"records": count, "queries_by_each": queries}
        for name, fields in _USAGE.items():
            times = []
            for _ in range(queries):
                started = time.monotonic()
                groups = (await stub.Usage(UsageRequest(**fields))).groups
                times.append((time.monotonic() - started) * 1000)
            measured = {"median_ms": round(quantile(times, 0.5), 2), "p95_ms": round(quantile(times, 0.95), 2)}
            report[name] = {"groups": len(groups), **measured}
        return report


def _filters(some: list[PayloadRecord], queries: int) -> dict[str, list[dict[str, Any]]]:
    """Values that occur in the file, for each filter alone; times all over the file."""
    dice = random.Random(0)  # noqa: S311
    newest = some[0].time.ToMicroseconds()

    def timestamp() -> Any:
        stamp = type(some[0].time)()
        stamp.FromMicroseconds(newest - dice.randrange(10_000_000_000))
        return stamp

    chosen = [dice.choice(some) for _ in range(queries)]
    values: Mapping[str, Any] = {
        "none": lambda record: {},
        **{
            name: lambda record, name=name: {name: getattr(record, name)}
            for name in ("model", "status", "finish_reason", "request_id", "trace_id", "client")
        },
        "since": lambda record: {"since": timestamp()},
        "until": lambda record: {"until": timestamp()},
        "min_duration_ms": lambda record: {"min_duration_ms": dice.uniform(0, 5000)},
        "min_ttft_ms": lambda record: {"min_ttft_ms": dice.uniform(0, 300)},
    }
    return {name: [value(record) for record in chosen] for name, value in values.items()}


async def _tap() -> dict[str, Any]:
    """Microseconds of the event loop for each chunk, while all threads behind the tap work."""
    async with _logger() as (target, _):
        with tempfile.TemporaryDirectory() as folder:
            tap = tap_of(target, spool=Path(folder))
            tap.start()
            costs: list[float] = []

            async def one_stream(number: int) -> None:
                recording = tap.begin(Begin(str(number), model="m", protocol="p", prompt="x" * 1000))
                await recording.flushed()
                for _ in range(_CHUNKS):
                    await asyncio.sleep(_PACE_S)
                    started = time.perf_counter_ns()
                    recording.chunk(" fox", [17])
                    costs.append((time.perf_counter_ns() - started) / 1000)
                recording.end("OK")

            await asyncio.gather(*(one_stream(number) for number in range(_OPEN)))
            await tap.drain(30)
            tap.close()
    return {
        "chunks": len(costs),
        "median_us": round(quantile(costs, 0.5), 2),
        "p99_us": round(quantile(costs, 0.99), 2),
        "dropped": dict(tap.dropped),
    }


if __name__ == "__main__":
    main()
