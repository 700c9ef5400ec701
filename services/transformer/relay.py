"""Models that need no text processing: the protocol's messages go to a predictor and back as they are.

One call at the predictor for each request, as for a generation: cancel, deadline and flow control are
HTTP/2's own. Errors keep their status and the hop that failed. A request leaves a record of metadata:
model, outcome and duration, but no tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from millrace.errors import DeadlineError, NotReadyError, RequestFailedError
from millrace.payload_tap import PayloadTap
from millrace.protos import inference_pb2 as pb
from millrace.stream_infer import EMPTY_FINAL
from millrace.telemetry.tracing import current_trace_id
from services.transformer.pipeline import Origin
from services.transformer.predictor_client import ERRORS_AS_STATUS, PROBE_TIMEOUT_S, PredictorClient


class Relay:
    """Owned by the event loop; one for all requests; its methods raise MillraceError."""

    def __init__(self, predictor: PredictorClient, tap: PayloadTap) -> None:
        self._inference = predictor.inference
        self._tap = tap

    async def infer(
        self, request: pb.ModelInferRequest, origin: Origin, timeout_s: float | None
    ) -> pb.ModelInferResponse:
        """The one answer to a request."""
        with self._recorded(request, origin, timeout_s):
            return await self._inference.ModelInfer(request, timeout=timeout_s)

    async def stream(
        self, request: pb.ModelInferRequest, origin: Origin, timeout_s: float | None
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The answers to a request as they come; closing the generator cancels it at the predictor."""
        # The front end answers this one itself; two empty responses would be one too many.
        request.parameters.pop(EMPTY_FINAL, None)

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            yield request

        with self._recorded(request, origin, timeout_s):
            call = self._inference.ModelStreamInfer(requests(), timeout=timeout_s, metadata=(ERRORS_AS_STATUS,))
            try:
                async for message in call:
                    if message.error_message:
                        raise RequestFailedError(message.error_message, hop="predictor")
                    yield message.infer_response
            finally:
                call.cancel()

    async def metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        with _answered_soon():
            return await self._inference.ModelMetadata(request, timeout=PROBE_TIMEOUT_S)

    async def config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        with _answered_soon():
            return await self._inference.ModelConfig(request, timeout=PROBE_TIMEOUT_S)

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """What one replica has counted, whichever the gateway asks."""
        with _answered_soon():
            return await self._inference.ModelStatistics(request, timeout=PROBE_TIMEOUT_S)

    @contextmanager
    def _recorded(self, request: pb.ModelInferRequest, origin: Origin, timeout_s: float | None) -> Iterator[None]:
        begun = time.monotonic()
        with self._tap.begin(
            request_id=origin.request_id,
            model=request.model_name,
            protocol=origin.protocol,
            trace_id=current_trace_id(),
        ) as recording:
            try:
                yield
            except (asyncio.CancelledError, GeneratorExit):
                # gRPC cancels a call whose deadline passes; that is not the caller's doing.
                if timeout_s is not None and time.monotonic() - begun >= timeout_s:
                    recording.end("DEADLINE_EXCEEDED", "the deadline passed")
                raise
            recording.end("OK")


@contextmanager
def _answered_soon() -> Iterator[None]:
    """The time limit of a question about a model is ours and not the caller's."""
    try:
        yield
    except DeadlineError:
        raise NotReadyError("the predictor does not answer", hop="predictor") from None
