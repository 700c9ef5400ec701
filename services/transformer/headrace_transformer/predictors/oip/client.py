"""Predictors call by call, through Envoy's inner listener: probes, tensors, and generations of other servers.

Any server of the Open Inference Protocol can stand there: features that it lacks (health by the name `ready`,
ModelConfig) are replaced or omitted. A generation there is one `ModelStreamInfer` call, so that cancel, deadline and
flow control are HTTP/2's own. Predictors of ours generate over links.py.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    HeadraceError,
    NotFoundError,
    NotImplementedMethodError,
    NotReadyError,
    RequestFailedError,
)
from headrace.oip.stream_infer import JOINS_ANSWERS, separate
from headrace.payload.call import RECORDED
from headrace.rpc.client.channel import UnaryMethod, open_channel, open_plain_channel
from headrace.rpc.client.interceptors import ClientSpan
from headrace.rpc.limits.wire_limits import fields
from headrace.rpc.server.listeners import READY
from headrace_protos import inference_pb2, inference_pb2_grpc
from headrace_transformer.predictors.oip.oip_call import ERRORS_AS_STATUS, predictor_answers
from headrace_transformer.predictors.resume.retries import Backoff

PROBE_TIMEOUT_S = 2.0

_SERVICE = "/inference.GRPCInferenceService"
_ERROR_MESSAGE = 1  # Field number in ModelStreamInferResponse.


@contextmanager
def probe_errors() -> Iterator[None]:
    """Converts the DeadlineError of a probe, whose timeout is ours and not the caller's, to NotReadyError."""
    try:
        yield
    except DeadlineError:
        raise NotReadyError("the predictor does not answer", hop="predictor") from None


class PredictorClient:
    """See the module; every method raises HeadraceError signed with the hop that failed.

    `wait_s` is how long a request waits for unavailable predictors, `start_wait_s` the same before its first output.
    `inference` has the calls about models; of a method that a server lacks they raise NotImplementedMethodError.
    `generate` is the method of generations (oip_call.py).
    """

    def __init__(self, target: str, wait_s: float = 120.0, start_wait_s: float = 30.0) -> None:
        self._wait_s = wait_s
        self._start_wait_s = start_wait_s
        self._channel = open_channel(target, "predictor")
        self.inference = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # One request a call, sent with the half-close. As a stream of requests grpc.aio may still be writing when the
        # predictor refuses, and then loses the refusal's status (grpc/grpc#36066).
        self.generate: grpc.aio.UnaryStreamMultiCallable[
            inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse
        ] = self._channel.unary_stream(
            f"{_SERVICE}/ModelStreamInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
        )
        self._plain_channel = open_plain_channel(target)
        self._infer_bytes = UnaryMethod(self._plain_channel, f"{_SERVICE}/ModelInfer", "predictor")
        # Without serializers: messages as the bytes they are on the wire.
        self._stream_bytes: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"{_SERVICE}/ModelStreamInfer"
        )

    async def close(self) -> None:
        await self._plain_channel.close()
        await self._channel.close()

    def backoff(self, deadline: Deadline, start_wait_s: float | None = None) -> Backoff:
        """The retries of a request, which may have less time to begin than others."""
        return Backoff(deadline, self._wait_s, self._start_wait_s if start_wait_s is None else start_wait_s)

    async def ready(self) -> bool:
        """Whether a predictor reports that a generation would work now."""
        request = health_pb2.HealthCheckRequest(service=READY)
        with suppress(HeadraceError):
            try:
                response = await self._health.Check(request, timeout=PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
                return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
            except (NotFoundError, NotImplementedMethodError):
                asked = inference_pb2.ServerReadyRequest()
                return (await self.inference.ServerReady(asked, timeout=PROBE_TIMEOUT_S)).ready
        return False

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a predictor reports that a model can be called now."""
        request = inference_pb2.ModelReadyRequest(name=name, version=version)
        with suppress(HeadraceError):
            return (await self.inference.ModelReady(request, timeout=PROBE_TIMEOUT_S)).ready
        return False

    async def infer(self, request: bytes, deadline: Deadline, wait_s: float | None = None) -> bytes:
        """The one answer to a serialized ModelInferRequest, a serialized ModelInferResponse.

        While no predictor is ready it waits, see retries.py: for `wait_s` at most, None for the default.
        """
        metadata = (RECORDED,)
        backoff = self.backoff(deadline, wait_s)
        return await backoff.retry(lambda: self._infer_bytes(request, deadline.left(), metadata))

    async def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The answers as they come, each a serialized ModelStreamInferResponse without error_message.

        The predictor marks the last one, as the request asks. Before the first one it waits as `infer` does. Closing
        the generator cancels the request at the predictor.
        """
        backoff, begun = self.backoff(deadline), False
        while True:
            try:
                async with aclosing(self._stream_once(request, deadline)) as responses:
                    async for response in responses:
                        begun = True
                        yield response
                return
            except NotReadyError as error:
                if begun:
                    raise
                not_ready = error
            await backoff.pause(not_ready, not_ready.retry_after_ms)

    async def _stream_once(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        span = ClientSpan()
        with span.of_next_call():
            metadata = (ERRORS_AS_STATUS, RECORDED, JOINS_ANSWERS)
            call = self._stream_bytes(request, timeout=deadline.left(), metadata=metadata)
        try:
            async for message in call:
                span.message()
                with predictor_answers():
                    responses = separate(message)
                for response in responses:
                    _raise_error(response)
                    yield response
        finally:
            call.cancel()


def _raise_error(response: bytes) -> None:
    """Raises the error that a response carries, of a predictor that does not end the call with it."""
    with predictor_answers():
        if all(field != _ERROR_MESSAGE for field, *_ in fields(response)):
            return
        message = inference_pb2.ModelStreamInferResponse.FromString(response).error_message
    if message:
        raise RequestFailedError(message, hop="predictor")
