"""A generation model as the loader returns it, and its engine, which the code above it knows by its interface."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import EngineLimits, EngineLoad, EngineStatistics
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_protos.steps_pb2 import Submission


class Limited(Protocol):
    """What has an engine's limits."""

    @property
    def limits(self) -> EngineLimits: ...


EngineT = TypeVar("EngineT", bound=Limited, covariant=True)


class Engine(Limited, Protocol):
    """Generates many sequences at once."""

    @property
    def statistics(self) -> EngineStatistics: ...

    @property
    def load(self) -> EngineLoad:
        """The current load; cheap; thread-safe."""

    @property
    def description(self) -> dict[str, str]:
        """Facts that ModelConfig reports as parameters, such as "runner"."""

    def submit(self, submission: Submission) -> MergingSlot:
        """Queues a complete and valid request; one whose answer is already complete gets an empty last chunk.

        Raises NotReadyError and OverloadedError; a refusal by the engine itself is the slot's error.
        """

    async def died(self) -> None:
        """Waits until the engine cannot continue, then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the engine; requests in flight end with NotReadyError (HopBrokenError if the engine has died)."""


@dataclass(frozen=True)
class LoadedModel(Generic[EngineT]):
    """A model's engine and the facts that its metadata and configuration report.

    `device_memory`: bytes that it holds on a GPU. `adapter`: its number in the engine, which is that of its base; 0 for
    a model that is no adapter.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    defaults: SamplingParameters
    engine: EngineT
    fingerprint: str = ""
    device_memory: int = 0
    adapter: int = 0
    generation: Mapping[str, Any] | None = None  # An adapter's own generation_config.json, in place of the base's.

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits if self.generation is None else self.engine.limits.with_defaults(self.generation)
