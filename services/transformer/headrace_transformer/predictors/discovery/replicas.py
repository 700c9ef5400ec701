"""Every predictor by its own address: the index, loading, unloading and statistics concern each of them.

Tensors go through Envoy, which picks one replica for each call, and generations over links.py. What changes or reports
a replica's state has to reach all: names of `addresses` are resolved at each call, and every address behind them is a
replica (resolver.py). Without addresses there is one predictor, behind Envoy's inner listener. Envoy does not call
replicas that are starting or unavailable; here they are used only if there is no other.

A model is what its best replica is: one that lacks it, or is away, is not the model's state. What a replica had when it
was last heard counts as LOADING while it is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, HopBrokenError, NotImplementedMethodError, NotReadyError
from headrace.rpc.client.channel import is_serving, open_channel
from headrace.rpc.server.listeners import READY as READY_NAME
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc
from headrace_transformer.predictors.discovery.descriptions import PredictorModel, described
from headrace_transformer.predictors.discovery.resolver import Resolver
from headrace_transformer.predictors.oip.client import PROBE_TIMEOUT_S, PredictorClient, probe_errors

if TYPE_CHECKING:
    from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceAsyncStub as Stub

_CLOSE_S = 5.0  # More than the timeout of a probe.

READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"
# The state of a model is the first of these that any replica reports.
_BEST_FIRST = (READY, LOADING, UNLOADING, UNAVAILABLE)

# Points in time and names, of which the latest is kept; every other number is a count or a duration.
_LATEST = {"last_inference", "batch_size"}

T = TypeVar("T")


@dataclass(frozen=True)
class ModelState:
    """The state of a model in an index, in Triton's terms."""

    state: str
    reason: str = ""
    version: str = ""


class Replicas:
    """Owned by the event loop; its methods raise HeadraceError."""

    def __init__(self, addresses: Sequence[str], predictor: PredictorClient) -> None:
        self._addresses = addresses
        self._resolver = Resolver(addresses)
        self._predictor = predictor
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()  # Of channels to addresses that are gone.
        self._tables: dict[str, dict[str, ModelState]] = {}  # The last index of each replica.

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(self._resolver.close(), *self._closing, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def channels(self) -> list[grpc.aio.Channel]:
        """A channel to each replica, in any state; empty if there is only one predictor, behind Envoy."""
        return list((await self._resolved()).values()) if self._addresses else []

    async def index(self) -> Mapping[str, ModelState] | None:
        """Every model's state over all replicas; None where the predictor has no index."""
        request = pb.RepositoryIndexRequest()
        try:
            answers = await self._probe(lambda stub: stub.RepositoryIndex(request, timeout=PROBE_TIMEOUT_S))
        except NotImplementedMethodError:
            return None
        away = {address: _of_one_away(self._tables.get(address, {})) for address in self._channels}
        self._tables = away | {address: _table(answer) for address, answer in answers.items()}
        return merged(self._tables.values())

    @property
    def are_several(self) -> bool:
        return len(self._channels) > 1

    async def ready(self) -> bool:
        """Whether a generation would work now at one of the replicas; one that hangs holds up no answer."""
        if self._addresses:
            asked = {asyncio.create_task(is_serving(channel, READY_NAME)) for channel in await self.channels()}
            try:
                while asked:
                    answered, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                    if any(not task.cancelled() and not task.exception() and task.result() for task in answered):
                        return True
            finally:
                for task in asked:
                    task.cancel()
        return await self._predictor.ready()

    async def describe(self, name: str) -> PredictorModel:
        """The description by a replica that has the model; it is the same at all of them."""
        metadata = await self.metadata(pb.ModelMetadataRequest(name=name))
        try:
            return described(metadata, (await self.config(pb.ModelConfigRequest(name=name))).config)
        except NotImplementedMethodError:
            return described(metadata, None)

    async def metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """The answer of a replica that has the model."""
        return await self._ask_having(request.name, lambda stub: stub.ModelMetadata(request, timeout=PROBE_TIMEOUT_S))

    async def config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """The same for its configuration; raises NotImplementedMethodError where the predictor has none."""
        return await self._ask_having(request.name, lambda stub: stub.ModelConfig(request, timeout=PROBE_TIMEOUT_S))

    async def _ask_having(self, name: str, ask: Callable[[Stub], Awaitable[T]]) -> T:
        """The answer of a replica that has the model, of any that answers if none is known to."""
        stubs = self._stubs(await self._resolved()) if self._addresses else {"": self._predictor.inference}
        known = {address: self._tables.get(address, {}).get(name) for address in stubs}
        having = [address for address, found in known.items() if found is not None and found.state == READY]
        error: HeadraceError = NotReadyError("no predictor answers", hop="predictor")
        for address in having or stubs:
            try:
                with probe_errors():
                    return await ask(stubs[address])
            except (NotReadyError, HopBrokenError) as away:
                error = away
        raise error

    async def load(self, request: pb.RepositoryModelLoadRequest, deadline: Deadline) -> None:
        """Loads a model at each replica; the first error is raised once all have answered."""
        timeout_s = deadline.left()
        await self._ask_serving(lambda stub: stub.RepositoryModelLoad(request, timeout=timeout_s), all_must=True)

    async def unload(self, request: pb.RepositoryModelUnloadRequest, deadline: Deadline) -> None:
        """The same for unloading; a replica that is away counts as one without the model."""
        timeout_s = deadline.left()
        for table in self._tables.values():
            table.pop(request.model_name, None)
        await self._ask_serving(lambda stub: stub.RepositoryModelUnload(request, timeout=timeout_s), all_must=True)

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """The sums of the replicas' counters."""
        answers = await self._probe(lambda stub: stub.ModelStatistics(request, timeout=PROBE_TIMEOUT_S))
        return summed(list(answers.values()))

    async def _probe(self, ask: Callable[[Stub], Awaitable[T]]) -> dict[str, T]:
        """The answers of the replicas that serve, within the timeout of a probe."""

        async def probe(stub: Stub) -> T:
            with probe_errors():
                return await ask(stub)

        return await self._ask_serving(probe)

    async def _ask_serving(self, ask: Callable[[Stub], Awaitable[T]], all_must: bool = False) -> dict[str, T]:
        """The answers of the replicas that serve, by address; raises an error if none, or with `all_must` not all,
        succeeded.
        """
        serving = await self._serving()
        answers = await _all_of(ask(stub) for stub in serving.values())
        good = {address: a for address, a in zip(serving, answers, strict=True) if not isinstance(a, BaseException)}
        bad = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in bad:
            if all_must or not good or not isinstance(error, HeadraceError):
                raise error
        return good

    async def _serving(self) -> dict[str, Stub]:
        """The replicas that serve, all of them if none does."""
        if not self._addresses:
            return {"": self._predictor.inference}
        channels = await self._resolved()
        serving = await _all_of(is_serving(channel, "") for channel in channels.values())
        chosen = [address for address, serves in zip(channels, serving, strict=True) if serves is True] or channels
        return self._stubs({address: channels[address] for address in chosen})

    @staticmethod
    def _stubs(channels: Mapping[str, grpc.aio.Channel]) -> dict[str, Stub]:
        return {address: inference_pb2_grpc.GRPCInferenceServiceStub(channel) for address, channel in channels.items()}

    async def _resolved(self) -> dict[str, grpc.aio.Channel]:
        """A channel to each replica, by address; one whose address is gone is closed when its calls have ended."""
        targets = await self._resolver.addresses()
        if not targets:
            raise NotReadyError("no predictor has an address", hop="predictor")
        # From here on nothing is awaited: another call may be here at any time, with other addresses.
        for target in [target for target in self._channels if target not in targets]:
            gone = self._channels.pop(target)
            closing = asyncio.create_task(_close_later(gone), name=f"close-{target}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for target in targets:
            if target not in self._channels:
                self._channels[target] = open_channel(target, "predictor")
        return {target: self._channels[target] for target in targets}


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


def merged(tables: Iterable[Mapping[str, ModelState]]) -> dict[str, ModelState]:
    """One state for each model of several replicas: that of the replica which is closest to READY."""
    tables = list(tables)
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: _best([table.get(name, ModelState(UNAVAILABLE)) for table in tables]) for name in names}


def _table(index: pb.RepositoryIndexResponse) -> dict[str, ModelState]:
    return {entry.name: ModelState(entry.state or READY, entry.reason, entry.version) for entry in index.models}


def _of_one_away(table: Mapping[str, ModelState]) -> dict[str, ModelState]:
    """What a replica that does not answer will have, as far as is known."""
    return {
        name: ModelState(LOADING, "its predictor is away", had.version)
        for name, had in table.items()
        if had.state in (READY, LOADING)
    }


def _best(states: Sequence[ModelState]) -> ModelState:
    known = sorted(
        (model_state for model_state in states if model_state.state in _BEST_FIRST),
        key=lambda model_state: (_BEST_FIRST.index(model_state.state), not model_state.reason),
    )
    if not known:
        return ModelState(UNAVAILABLE)
    best, worst = known[0], known[-1]
    lacking = sum(model_state.state != READY for model_state in states)
    if 0 < lacking < len(states):
        reason = f"{lacking} of {len(states)} replicas lack it" + (f": {worst.reason}" if worst.reason else "")
        return ModelState(best.state, reason, best.version)
    return best


def summed(answers: Iterable[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """ModelStatistics of several replicas as one: the counts of each model and version, added up."""
    totals: dict[tuple[str, str], pb.ModelStatistics] = {}
    for answer in answers:
        for statistics in answer.model_stats:
            total = totals.setdefault((statistics.name, statistics.version), pb.ModelStatistics())
            _add(total, statistics)
    return pb.ModelStatisticsResponse(model_stats=totals.values())


def _add(total: Message, one: Message) -> None:
    for field, value in one.ListFields():
        if field.name == "batch_stats":
            _add_batches(getattr(total, field.name), value)
        elif field.name == "memory_usage":
            getattr(total, field.name).extend(value)
        elif field.name == "response_stats":
            for key in value:
                _add(getattr(total, field.name)[key], value[key])
        elif isinstance(value, Message):
            # Present though it may be empty.
            getattr(total, field.name).SetInParent()
            _add(getattr(total, field.name), value)
        elif isinstance(value, int):
            own = getattr(total, field.name)
            setattr(total, field.name, max(own, value) if field.name in _LATEST else own + value)
        else:
            setattr(total, field.name, value)


def _add_batches(totals: Any, batches: Iterable[pb.InferBatchStatistics]) -> None:
    for batch in batches:
        total = next((known for known in totals if known.batch_size == batch.batch_size), None)
        _add(totals.add() if total is None else total, batch)
