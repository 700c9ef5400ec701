"""The interface of the server behind TRANSFORMER_PREDICTOR, for either protocol.

`client.py` speaks gRPC (`grpc-v2`), `v2_rest/client.py` REST (`v2`): KServe's names for the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from headrace.deadline import Deadline
from headrace.errors import DeadlineError, NotReadyError
from headrace.rpc.client_interceptors import CallSpan
from headrace_protos import inference_pb2 as pb
from services.transformer.predictors.retries import Backoff
from services.transformer.predictors.tokens import Generation

if TYPE_CHECKING:
    from services.transformer.predictors.oip_call import OipCall

PROBE_TIMEOUT_S = 2.0

RequestT = TypeVar("RequestT", contravariant=True)
ResponseT = TypeVar("ResponseT", covariant=True)


@contextmanager
def probe_errors() -> Iterator[None]:
    """Converts the DeadlineError of a probe, whose timeout is ours and not the caller's, to NotReadyError."""
    try:
        yield
    except DeadlineError:
        raise NotReadyError("the predictor does not answer", hop="predictor") from None


class Method(Protocol[RequestT, ResponseT]):
    """A method of a stub; raises HeadraceError."""

    def __call__(self, request: RequestT, /, *, timeout: float | None = None) -> Awaitable[ResponseT]: ...


class Stub(Protocol):
    """The methods about models of GRPCInferenceService; a missing one raises NotImplementedMethodError."""

    @property
    def ModelMetadata(self) -> Method[pb.ModelMetadataRequest, pb.ModelMetadataResponse]: ...  # noqa: N802
    @property
    def ModelConfig(self) -> Method[pb.ModelConfigRequest, pb.ModelConfigResponse]: ...  # noqa: N802
    @property
    def ModelStatistics(self) -> Method[pb.ModelStatisticsRequest, pb.ModelStatisticsResponse]: ...  # noqa: N802
    @property
    def RepositoryIndex(self) -> Method[pb.RepositoryIndexRequest, pb.RepositoryIndexResponse]: ...  # noqa: N802
    @property
    def RepositoryModelLoad(  # noqa: N802
        self,
    ) -> Method[pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse]: ...
    @property
    def RepositoryModelUnload(  # noqa: N802
        self,
    ) -> Method[pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse]: ...


class Predictor(ABC):
    """Every method raises HeadraceError signed with the hop that failed.

    `wait_s` is how long a request waits for unavailable predictors, `start_wait_s` the same before its first output.
    `streams`: a request may have several answers, like a generation of token ids.
    """

    streams: ClassVar[bool]

    def __init__(self, wait_s: float, start_wait_s: float) -> None:
        self._wait_s = wait_s
        self._start_wait_s = start_wait_s

    def backoff(self, deadline: Deadline, start_wait_s: float | None = None) -> Backoff:
        """The retries of a request, which may have less time to begin than others."""
        return Backoff(deadline, self._wait_s, self._start_wait_s if start_wait_s is None else start_wait_s)

    @property
    @abstractmethod
    def inference(self) -> Stub:
        """Calls about models."""

    @abstractmethod
    async def ready(self) -> bool:
        """Whether a predictor reports that a generation would work now."""

    @abstractmethod
    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a predictor reports that a model can be called now."""

    @abstractmethod
    async def infer_bytes(self, request: bytes, deadline: Deadline) -> bytes:
        """The one answer to a serialized ModelInferRequest, a serialized ModelInferResponse."""

    @abstractmethod
    def stream_bytes(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The answers as they come, each a serialized ModelStreamInferResponse; closing the generator cancels."""

    @abstractmethod
    def generate(self, generation: Generation, deadline: Deadline, span: CallSpan) -> OipCall:
        """Begins the call; `span` receives its span."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connections."""
