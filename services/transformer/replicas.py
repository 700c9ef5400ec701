"""Every predictor by its own address: the index, loading, unloading and statistics concern each of them.

Inference goes through Envoy, which picks one replica a call. What changes or tells a replica's state
has to reach all: names of `addresses` are resolved at each call, and every address behind them is a
replica. Without addresses there is one predictor, behind Envoy's inner listener. Replicas that are
starting or away get no calls of Envoy's, and count here only where no other does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc

from millrace.channel import open_channel
from millrace.errors import MillraceError, NotImplementedMethodError, NotReadyError
from millrace.health import is_serving
from millrace.protos import inference_pb2 as pb
from millrace.protos import inference_pb2_grpc
from services.transformer.predictor_client import PROBE_TIMEOUT_S, PredictorClient, answered_soon
from services.transformer.predictor_models import PredictorModel, described
from services.transformer.statistics import summed

READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
# The state of a model is the first of these that any replica says.
_WORST_FIRST = (UNAVAILABLE, UNLOADING, LOADING, READY)

Stub: TypeAlias = "inference_pb2_grpc.GRPCInferenceServiceAsyncStub"  # Text, for it is in the types alone.
T = TypeVar("T")


@dataclass(frozen=True)
class ModelState:
    """What an index says of a model, in Triton's words."""

    state: str
    reason: str = ""
    version: str = ""


class Replicas:
    """Owned by the event loop; its methods raise MillraceError."""

    def __init__(self, addresses: Sequence[str], predictor: PredictorClient) -> None:
        self._addresses = addresses
        self._predictor = predictor
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def channels(self) -> list[grpc.aio.Channel]:
        """A channel to each replica, in whatever state it is; empty where there is one, behind Envoy."""
        return await self._resolved() if self._addresses else []

    async def index(self) -> Mapping[str, ModelState] | None:
        """Every model's state over all replicas; None where the predictor has no index."""

        async def ask(stub: Stub) -> pb.RepositoryIndexResponse:
            with answered_soon():
                return await stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PROBE_TIMEOUT_S)

        try:
            return merged(await self._ask_serving(ask))
        except NotImplementedMethodError:
            return None

    async def describe(self, name: str) -> PredictorModel:
        """What a replica says of a model that is READY, which is the same at all of them."""
        stub = (await self._serving())[0]
        with answered_soon():
            asked = pb.ModelMetadataRequest(name=name)
            metadata = await stub.ModelMetadata(asked, timeout=PROBE_TIMEOUT_S)
            try:
                answer = await stub.ModelConfig(pb.ModelConfigRequest(name=name), timeout=PROBE_TIMEOUT_S)
            except NotImplementedMethodError:
                return described(metadata, None)
        return described(metadata, answer.config)

    async def load(self, request: pb.RepositoryModelLoadRequest, timeout_s: float | None) -> None:
        """Loads a model at each replica; the first error is raised once all have answered."""
        await self._ask_serving(lambda stub: stub.RepositoryModelLoad(request, timeout=timeout_s), all_must=True)

    async def unload(self, request: pb.RepositoryModelUnloadRequest, timeout_s: float | None) -> None:
        """The same for unloading."""
        await self._ask_serving(lambda stub: stub.RepositoryModelUnload(request, timeout=timeout_s), all_must=True)

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """The sum of what the replicas have counted."""

        async def ask(stub: Stub) -> pb.ModelStatisticsResponse:
            with answered_soon():
                return await stub.ModelStatistics(request, timeout=PROBE_TIMEOUT_S)

        return summed(await self._ask_serving(ask))

    async def _ask_serving(self, ask: Callable[[Stub], Awaitable[T]], all_must: bool = False) -> list[T]:
        """The answers of the replicas that serve, at least one; an error where none, or not all, gave one."""
        answers = await asyncio.gather(*(ask(stub) for stub in await self._serving()), return_exceptions=True)
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
        serving = await asyncio.gather(*(is_serving(channel, "") for channel in channels))
        chosen = [channel for channel, serves in zip(channels, serving, strict=True) if serves] or channels
        return [inference_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in chosen]

    async def _resolved(self) -> list[grpc.aio.Channel]:
        """A channel to each replica; those whose address is gone are closed."""
        targets = [target for address in self._addresses for target in await _resolve(address)]
        if not targets:
            raise NotReadyError("no predictor has an address", hop="predictor")
        for gone in self._channels.keys() - set(targets):
            await self._channels.pop(gone).close()
        for target in targets:
            if target not in self._channels:
                self._channels[target] = open_channel(target, "predictor")
        return [self._channels[target] for target in dict.fromkeys(targets)]


def merged(indexes: Iterable[pb.RepositoryIndexResponse]) -> dict[str, ModelState]:
    """One state for each model of several replicas: READY where it is so at all of them."""
    tables = [
        {entry.name: ModelState(entry.state or READY, entry.reason, entry.version) for entry in index.models}
        for index in indexes
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: _worst([table.get(name, ModelState(UNAVAILABLE)) for table in tables]) for name in names}


def _worst(states: Sequence[ModelState]) -> ModelState:
    known = [told for told in states if told.state in _WORST_FIRST]
    worst = min(known, key=lambda told: _WORST_FIRST.index(told.state), default=ModelState(UNAVAILABLE))
    lacking = sum(told.state != READY for told in states)
    if 0 < lacking < len(states):
        reason = f"{lacking} of {len(states)} replicas lack it" + (f": {worst.reason}" if worst.reason else "")
        return ModelState(worst.state, reason, worst.version)
    return worst


async def _resolve(address: str) -> list[str]:
    """Every IPv4 address behind host:port; empty where the name is not known, as of a service without replicas."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({f"{socket_address[0]!s}:{port}" for *_, socket_address in found})
