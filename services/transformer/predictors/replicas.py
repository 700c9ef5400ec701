"""Every predictor by its own address: the index, loading, unloading and statistics concern each of them.

Tensors go through Envoy, which picks one replica for each call, and generations over links.py. What changes or reports
a replica's state has to reach all: names of `addresses` are resolved at each call, and every address behind them is a
replica (resolver.py). Without addresses there is one predictor, behind Envoy's inner listener. Envoy does not call
replicas that are starting or unavailable; here they are used only if there is no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from millrace.deadline import Deadline
from millrace.errors import HopBrokenError, MillraceError, NotImplementedMethodError, NotReadyError
from millrace.rpc.channel import open_channel
from millrace.rpc.health import is_serving
from millrace_protos import inference_pb2 as pb
from millrace_protos import inference_pb2_grpc
from services.transformer.predictors.descriptions import PredictorModel, described
from services.transformer.predictors.predictor import PROBE_TIMEOUT_S, Predictor, Stub, probe_errors
from services.transformer.predictors.resolver import Resolver
from services.transformer.predictors.statistics import summed

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0  # More than the timeout of a probe.

READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
# The state of a model is the first of these that any replica reports.
_WORST_FIRST = (UNAVAILABLE, UNLOADING, LOADING, READY)

T = TypeVar("T")


@dataclass(frozen=True)
class ModelState:
    """The state of a model in an index, in Triton's terms."""

    state: str
    reason: str = ""
    version: str = ""


class Replicas:
    """Owned by the event loop; its methods raise MillraceError."""

    def __init__(self, addresses: Sequence[str], predictor: Predictor) -> None:
        self._addresses = addresses
        self._resolver = Resolver(addresses)
        self._predictor = predictor
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: dict[object, asyncio.Task[None]] = {}  # Background tasks by purpose.

    async def close(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()
        await asyncio.gather(self._resolver.close(), *self._tasks.values(), return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def channels(self) -> list[grpc.aio.Channel]:
        """A channel to each replica, in any state; empty if there is only one predictor, behind Envoy."""
        return await self._resolved() if self._addresses else []

    async def index(self) -> Mapping[str, ModelState] | None:
        """Every model's state over all replicas; None where the predictor has no index."""

        async def ask(stub: Stub) -> pb.RepositoryIndexResponse:
            with probe_errors():
                return await stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PROBE_TIMEOUT_S)

        try:
            return merged(await self._ask_serving(ask))
        except NotImplementedMethodError:
            return None

    async def describe(self, name: str) -> PredictorModel:
        """A replica's description of a READY model, which is the same at all replicas."""
        stub = (await self._serving())[0]
        with probe_errors():
            calls = pb.ModelMetadataRequest(name=name)
            metadata = await stub.ModelMetadata(calls, timeout=PROBE_TIMEOUT_S)
            try:
                answer = await stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=PROBE_TIMEOUT_S)
            except NotImplementedMethodError:
                return described(metadata, None, self._predictor.streams)
        return described(metadata, answer.config)

    async def load(self, request: pb.RepositoryModelLoadRequest, deadline: Deadline) -> None:
        """Loads a model at each replica; the first error is raised once all have answered."""
        timeout_s = deadline.left()
        await self._ask_serving(lambda stub: stub.RepositoryModelLoad(request, timeout=timeout_s), all_must=True)

    async def unload(self, request: pb.RepositoryModelUnloadRequest, deadline: Deadline) -> None:
        """The same for unloading."""
        timeout_s = deadline.left()
        await self._ask_serving(lambda stub: stub.RepositoryModelUnload(request, timeout=timeout_s), all_must=True)

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """The sums of the replicas' counters."""

        async def ask(stub: Stub) -> pb.ModelStatisticsResponse:
            with probe_errors():
                return await stub.ModelStatistics(request, timeout=PROBE_TIMEOUT_S)

        return summed(await self._ask_serving(ask))

    def _run(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        """Runs something in the background; its errors are dropped."""

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("%s failed", task.get_name(), exc_info=error)

        task = self._tasks[key] = asyncio.create_task(work, name=f"replicas-{key}")
        task.add_done_callback(ended)

    async def _ask_serving(self, ask: Callable[[Stub], Awaitable[T]], all_must: bool = False) -> list[T]:
        """The answers of the replicas that serve; raises an error if none, or with `all_must` not all, succeeded."""
        answers = await _all_of(ask(stub) for stub in await self._serving())
        good = [answer for answer in answers if not isinstance(answer, BaseException)]
        bad = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in bad:
            if all_must or not good or not isinstance(error, MillraceError):
                raise error
        return good

    async def _serving(self) -> list[Stub]:
        if not self._addresses:
            return [self._predictor.inference]
        channels = await self._resolved()
        serving = await _all_of(is_serving(channel, "") for channel in channels)
        chosen = [channel for channel, serves in zip(channels, serving, strict=True) if serves is True] or channels
        return [inference_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in chosen]

    async def _resolved(self) -> list[grpc.aio.Channel]:
        """A channel to each replica; one whose address is gone is closed when its calls have ended."""
        targets = await self._resolver.addresses()
        if not targets:
            raise NotReadyError("no predictor has an address", hop="predictor")
        # From here on nothing is awaited: another call may be here at any time, with other addresses.
        for target in [target for target in self._channels if target not in targets]:
            gone = self._channels.pop(target)
            self._run(gone, _close_later(gone))
        for target in targets:
            if target not in self._channels:
                self._channels[target] = open_channel(target, "predictor")
        return [self._channels[target] for target in targets]


async def _close_later(channel: grpc.aio.Channel) -> None:
    """Closes a channel that gets no new calls, once the calls in flight, except loads, have ended."""
    try:
        await asyncio.sleep(_CLOSE_S)
    finally:
        await channel.close()


async def _all_of(calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """The result or error of each call.

    A call whose channel is closed ends as cancelled; that is not a cancellation of the caller.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    gone = HopBrokenError("the predictor has left", hop="predictor")
    return [gone if isinstance(outcome, asyncio.CancelledError) else outcome for outcome in outcomes]


def merged(indexes: Iterable[pb.RepositoryIndexResponse]) -> dict[str, ModelState]:
    """One state for each model of several replicas: READY where it is so at all of them."""
    tables = [
        {entry.name: ModelState(entry.state or READY, entry.reason, entry.version) for entry in index.models}
        for index in indexes
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: _worst([table.get(name, ModelState(UNAVAILABLE)) for table in tables]) for name in names}


def _worst(states: Sequence[ModelState]) -> ModelState:
    known = [model_state for model_state in states if model_state.state in _WORST_FIRST]
    worst = min(known, key=lambda model_state: _WORST_FIRST.index(model_state.state), default=ModelState(UNAVAILABLE))
    lacking = sum(model_state.state != READY for model_state in states)
    if 0 < lacking < len(states):
        reason = f"{lacking} of {len(states)} replicas lack it" + (f": {worst.reason}" if worst.reason else "")
        return ModelState(worst.state, reason, worst.version)
    return worst
