"""Single pieces of a service's code on the path of a call, each measured alone: microseconds of processor time.

The pieces run as in a service, with telemetry and log lines set up in the same way, but without gRPC: the context of a
call is a fake. Time is that of the whole process, so it includes a piece's work on other threads; that of an empty
task is subtracted. A call of the transformer runs each piece once, one of the predictor all but the client's side and
the payload record.

`python -m bench.call_parts` prints them as JSON; `parts` runs that in a separate process.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import uvloop

from bench.contenders import ROOT
from bench.tensor_cases import CASES, INFER
from headrace.deadline import Deadline
from headrace.payload.call import recorded
from headrace.payload.tap import PayloadTap
from headrace.payload.tensors import answer_tensors, request_tensors
from headrace.rpc.client.interceptors import ClientSpans
from headrace.rpc.server.call_context import call_context
from headrace.rpc.server.call_telemetry import ServerTelemetry
from headrace.rpc.server.handlers import Interceptor
from headrace.telemetry.logs import CALLS, set_up_logging
from headrace.telemetry.setup import set_up_telemetry
from headrace_transformer.inference.request import InferRequest
from tests.support.payload_ingest import tap_of

_CALLS = 1000
_REPEATS = 7
_REQUEST = CASES["tiny"].request("echo")
# The metadata of the gateway.
_METADATA = (
    ("user-agent", "grpc-python-asyncio/1.85.1 grpc-c/54.0.0 (linux; chttp2)"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("x-request-id", "5d8f4a3e-21c7-9b1a-8f3c-0e5b7d6a9c42"),
    ("x-headrace-call-id", "0d8f4a3e-21c7-9b1a-8f3c-0e5b7d6a9c43"),
    ("x-headrace-client", "127.0.0.1"),
    ("x-forwarded-for", "127.0.0.1"),
    ("x-forwarded-proto", "http"),
    ("grpc-accept-encoding", "identity, deflate, gzip"),
)

# One call of a piece; it runs in its own context, like the task of a call.
Piece = Callable[[], Awaitable[Any]]


class _Details(NamedTuple):
    """Details of a call, for the interceptors of server and client."""

    method: str = INFER
    invocation_metadata: tuple[tuple[str, str], ...] = _METADATA
    metadata: Any = None
    timeout: float | None = None


class _Context:
    """A fake of gRPC's context of a call."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return _METADATA

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float:
        return 60.0

    def code(self) -> None:
        return None

    async def read(self) -> bytes:
        return _REQUEST


class _ClientCall:
    """A fake of a client's call that has ended."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


async def parts() -> dict[str, float]:
    """Each piece's microseconds for a call, the minimum of some repeats; raises RuntimeError if the process fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.call_parts"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # It has the log lines.
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("`python -m bench.call_parts` fails")
    measured: dict[str, float] = json.loads(output)
    return measured


async def _measure_all() -> dict[str, float]:
    set_up_telemetry("bench")
    set_up_logging("bench", "INFO", "json")
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        tap = tap_of("127.0.0.1:1", spool=Path(folder))
        tap.start()
        try:
            empty = await _measure(_nothing)
            for name, piece in _pieces(tap).items():
                measured[name] = await _measure(piece) - empty
            logging.getLogger(CALLS).setLevel(logging.WARNING)
            measured["the same, without the log line"] = await _measure(_served(ServerTelemetry())) - empty
        finally:
            await asyncio.to_thread(tap.close)
    return measured


async def _nothing() -> None:
    pass


def _pieces(tap: PayloadTap) -> dict[str, Piece]:
    context: Any = _Context()

    async def head() -> None:
        InferRequest(_REQUEST)

    async def of_call() -> None:
        call_context(context, INFER)

    async def deadline() -> None:
        Deadline.after(60.0).left()

    async def scope() -> None:
        async with Deadline.after(60.0).scope():
            pass

    async def record() -> None:
        call = call_context(context, INFER)
        with recorded(tap, call, "echo", inputs=request_tensors(_REQUEST)) as recording:
            recording.end("OK", outputs=answer_tensors(b""))

    async def record_on_disk() -> None:
        call = call_context(context, INFER)
        with recorded(tap, call, "echo", inputs=request_tensors(_REQUEST)) as recording:
            recording.end("OK", outputs=answer_tensors(b""))
            await recording.flushed()

    spans = ClientSpans(streams=False)

    async def client() -> None:
        await spans.call(_answered, _Details(), _REQUEST)

    return {
        "head of the request parsed": head,
        "call context": of_call,
        "deadline taken and read": deadline,
        "deadline as a scope": scope,
        "admission, reading, error mapping": _served(None),
        "the same, with span, metric and log line": _served(ServerTelemetry()),
        "client span, its metric and metadata": client,
        "call context and payload record": record,
        "the same, waiting for the disk": record_on_disk,
    }


async def _answered(_: Any, __: Any) -> _ClientCall:
    return _ClientCall()


async def _answer(request: Any, _: Any) -> bytes:
    return b""


def _served(telemetry: ServerTelemetry | None) -> Piece:
    interceptor, details = Interceptor("bench", telemetry=telemetry), _Details()

    async def piece() -> None:
        # gRPC asks an interceptor for the handler of each call.
        handler: Any = await interceptor.intercept_service(_unary_handler, details)  # type: ignore[arg-type]
        await handler.stream_unary(None, _Context())

    return piece


async def _unary_handler(_: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(_answer, InferRequest, bytes)


async def _measure(piece: Piece) -> float:
    await _run(piece, _CALLS // 10)
    return min([await _run(piece, _CALLS) for _ in range(_REPEATS)])


async def _run(piece: Piece, count: int) -> float:
    """Microseconds of processor time of a call."""
    base: Context = copy_context()
    began = time.process_time()
    for _ in range(count):
        await asyncio.create_task(piece(), context=base.copy())  # type: ignore[arg-type]
    await asyncio.sleep(0.05)  # Other threads end their work.
    return 1e6 * (time.process_time() - began) / count


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        print(json.dumps(loop.run(_measure_all())))
