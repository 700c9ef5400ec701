"""Calls through the gateway of a running stack, one at a time or as a light load of every kind."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.oip.tensors import Tensor
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import ids_request, text_request

DEADLINE_S = 60.0

# Reconnects at once to a restarted gateway; by default gRPC may wait for two minutes.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)

Call = Callable[[grpc.aio.Channel], Awaitable[None]]


def channel(gateway: str, authority: str = "") -> grpc.aio.Channel:
    named = (("grpc.default_authority", authority),) if authority else ()
    return grpc.aio.insecure_channel(gateway, options=_OPTIONS + named)


async def generate(
    channel: grpc.aio.Channel, max_tokens: int = 40, started: asyncio.Event | None = None, pace: float = 0.0
) -> None:
    """A stream, read to its end; sets `started` at the first token."""
    request = headrace_pb2.GenerateRequest(
        model="storyteller", prompt="Once upon a time", max_tokens=max_tokens, ignore_eos=True, pace=pace
    )
    tokens, reason = 0, ""
    async for response in headrace_pb2_grpc.TextGenerationStub(channel).Generate(request, timeout=DEADLINE_S):
        tokens += len(response.token_ids)
        reason = response.finish_reason
        if started is not None and tokens:
            started.set()
    assert (tokens, reason) == (max_tokens, "length")


async def infer_text(channel: grpc.aio.Channel) -> None:
    request = text_request("normalizer", "date: 3 Mar 2021")
    response = await GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=DEADLINE_S)
    assert b"2021-03-03" in response.raw_output_contents[0]


async def infer_ids(channel: grpc.aio.Channel) -> None:
    """Needs a channel whose authority is `predictor`."""
    ids = Tensor("input_ids", "INT64", np.array([[20, 30, 40, 1]], dtype=np.int64))
    request = ids_request("normalizer", ids, max_tokens=4)
    assert (await GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=DEADLINE_S)).raw_output_contents


async def health(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def query(channel: grpc.aio.Channel) -> None:
    records = headrace_pb2_grpc.PayloadLogStub(channel).Query(
        headrace_pb2.QueryPayloadsRequest(page_size=1), timeout=DEADLINE_S
    )
    async for record in records:
        assert record.record_id


@dataclass(frozen=True)
class Kind:
    """A kind of call, and the services whose death may fail it."""

    name: str
    call: Call
    passes: frozenset[str]
    authority: str = ""


GENERATE = Kind("a stream of text", generate, frozenset({"envoy", "transformer", "predictor"}))
INFER_TEXT = Kind("a unary call with text", infer_text, frozenset({"envoy", "transformer", "predictor"}))
INFER_IDS = Kind("a unary call at the predictor", infer_ids, frozenset({"envoy", "predictor"}), "predictor")
HEALTH = Kind("a health check", health, frozenset({"envoy", "transformer"}))
QUERY = Kind("a query of the payload log", query, frozenset({"envoy", "logger"}))
KINDS = (GENERATE, INFER_TEXT, INFER_IDS, HEALTH, QUERY)


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    began: float
    seconds: float
    error: grpc.aio.AioRpcError | None


@dataclass
class Load:
    """The outcomes of a load so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    def errors(self, *kinds: Kind) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind in kinds and outcome.error is not None]

    def succeeded_since(self, moment: float, kinds: tuple[Kind, ...] = KINDS) -> bool:
        """Whether a call of each kind that began after `moment` succeeded."""
        return set(kinds) <= {o.kind for o in self.outcomes if o.error is None and o.began > moment}


@asynccontextmanager
async def load(gateway: str, kinds: tuple[Kind, ...], callers: int = 1, pause_s: float = 0.1) -> AsyncIterator[Load]:
    """Calls of every kind for the length of the block, each by so many callers; all of them have ended after it."""
    seen, ending = Load(), asyncio.Event()

    async def caller(kind: Kind) -> None:
        async with channel(gateway, kind.authority) as open_channel:
            while not ending.is_set():
                began, error = time.monotonic(), None
                try:
                    await kind.call(open_channel)
                except grpc.aio.AioRpcError as raised:
                    error = raised
                seen.outcomes.append(Outcome(kind, began, time.monotonic() - began, error))
                await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as callers_of_all:
        for kind in kinds:
            for _ in range(callers):
                callers_of_all.create_task(caller(kind))
        try:
            yield seen
        finally:
            ending.set()
