"""The predictors, through Envoy's inner listener: one `ModelStreamInfer` call a generation.

One call each, so that cancel, deadline and flow control are HTTP/2's own; through Envoy, because one
long-lived connection would pin every call to one replica.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.channel import open_channel
from millrace.errors import HopBrokenError, MillraceError, RequestFailedError
from millrace.protos import inference_pb2, inference_pb2_grpc
from millrace.protos.millrace_pb2 import Usage
from millrace.sampling import SamplingParameters, parameters_of, set_parameters
from millrace.server import READY
from millrace.tensors import Tensor, add_input, decode_outputs

_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_PROBE_TIMEOUT_S = 2.0
# Triton's own switch: an error ends the call with its status, not with a text inside the stream.
_ERRORS_AS_STATUS = ("triton_grpc_error", "true")


@dataclass(frozen=True)
class ModelLimits:
    """What the predictor says of a model."""

    context_length: int
    is_encoder_decoder: bool

    def room(self, prompt_tokens: int) -> int:
        """Tokens that the context has left for output after a prompt."""
        return self.context_length if self.is_encoder_decoder else self.context_length - prompt_tokens


@dataclass(frozen=True)
class TokenChunk:
    """New token ids, with their log probabilities where asked for; the last one ends the generation."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    usage: Usage | None


class PredictorClient:
    """Every method raises MillraceError signed with the hop that failed."""

    def __init__(self, target: str) -> None:
        self._channel = open_channel(target, "predictor")
        self._inference = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def ready(self) -> bool:
        """Whether a predictor says that a generation would work now."""
        request = health_pb2.HealthCheckRequest(service=READY)
        try:
            response = await self._health.Check(request, timeout=_PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
        except MillraceError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def limits(self, model: str) -> ModelLimits:
        request = inference_pb2.ModelConfigRequest(name=model)
        config = (await self._inference.ModelConfig(request, timeout=_PROBE_TIMEOUT_S)).config
        try:
            return ModelLimits(
                int(config.parameters["context_length"].string_value),
                config.parameters["is_encoder_decoder"].string_value == "true",
            )
        except ValueError:
            raise HopBrokenError(f"model {model!r} does not say its context_length", hop="predictor") from None

    async def generate(
        self, model: str, request_id: str, prompt_ids: list[int], sampling: SamplingParameters, timeout_s: float | None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one generation; closing the generator cancels it at the predictor."""
        request = inference_pb2.ModelInferRequest(model_name=model, id=request_id)
        add_input(request, Tensor("input_ids", "INT32", np.array(prompt_ids, dtype=np.int32)))
        set_parameters(request.parameters, sampling.model_dump(exclude_none=True))

        async def requests() -> AsyncIterator[inference_pb2.ModelInferRequest]:
            yield request

        call = self._inference.ModelStreamInfer(requests(), timeout=timeout_s, metadata=(_ERRORS_AS_STATUS,))
        finished = False
        try:
            async with aclosing(_chunks(call)) as chunks:
                async for chunk in chunks:
                    finished = chunk.finish_reason is not None
                    yield chunk
        except MillraceError:
            # What breaks after the last token breaks nothing of the answer.
            if not finished:
                raise
        finally:
            call.cancel()
        if not finished:
            raise HopBrokenError("the predictor ended the stream before its last token", hop="predictor")


async def _chunks(
    call: grpc.aio.StreamStreamCall[inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse],
) -> AsyncGenerator[TokenChunk, None]:
    async for message in call:
        if message.error_message:
            raise RequestFailedError(message.error_message, hop="predictor")
        response = message.infer_response
        outputs = decode_outputs(response)
        parameters = parameters_of(response.parameters)
        reason = parameters.get("finish_reason")
        usage = None
        if reason is not None:
            usage = Usage(**{name: int(parameters.get(name, 0)) for name in _USAGE})
        logprobs = outputs["logprobs"].array.tolist() if "logprobs" in outputs else []
        yield TokenChunk(outputs["output_ids"].array.tolist(), logprobs, reason, usage)
