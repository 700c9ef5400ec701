"""The predictors, through Envoy's inner listener: one `ModelStreamInfer` call a generation.

One call each, so that cancel, deadline and flow control are HTTP/2's own; through Envoy, because one
long-lived connection would pin every call to one replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

import grpc
import numpy as np

from millrace.channel import open_channel
from millrace.errors import DeadlineError, HopBrokenError, MillraceError, NotReadyError, RequestFailedError
from millrace.health import is_serving
from millrace.protos import inference_pb2, inference_pb2_grpc
from millrace.protos.millrace_pb2 import Usage
from millrace.sampling import ContextLimits, SamplingParameters, parameters_of, set_parameters
from millrace.server import READY
from millrace.tensors import Tensor, add_input, decode_outputs

_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
PROBE_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 1.0
# Triton's own switch: an error ends the call with its status, not with a text inside the stream.
ERRORS_AS_STATUS = ("triton_grpc_error", "true")


@dataclass(frozen=True)
class TokenChunk:
    """New token ids, with log probabilities (see TextChunk) where asked for; the last one ends the generation."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str | None
    usage: Usage | None


class PredictorClient:
    """Every method raises MillraceError signed with the hop that failed."""

    def __init__(self, target: str) -> None:
        self._channel = open_channel(target, "predictor")
        self.inference = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def ready(self) -> bool:
        """Whether a predictor says that a generation would work now."""
        return await is_serving(self._channel, READY)

    async def limits(self, model: str) -> ContextLimits:
        """What the predictor says of a model."""
        request = inference_pb2.ModelConfigRequest(name=model)
        try:
            config = (await self.inference.ModelConfig(request, timeout=PROBE_TIMEOUT_S)).config
        except DeadlineError:
            raise NotReadyError("the predictor does not answer", hop="predictor") from None
        try:
            return ContextLimits(
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

        call = self.inference.ModelStreamInfer(requests(), timeout=timeout_s, metadata=(ERRORS_AS_STATUS,))
        try:
            async with aclosing(_chunks(call)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if chunk.finish_reason is not None:
                        await _until_end(chunks)
                        return
            raise HopBrokenError("the predictor ended the stream before its last token", hop="predictor")
        finally:
            call.cancel()


async def _until_end(chunks: AsyncIterator[TokenChunk]) -> None:
    """Reads the call's status, so that it ends as OK and not as cancelled; the answer does not depend on it."""
    with suppress(MillraceError, TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in chunks:
                pass


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
        yield TokenChunk(outputs["output_ids"].array.tolist(), logprobs, _top_logprobs(outputs), reason, usage)


def _top_logprobs(outputs: Mapping[str, Tensor]) -> list[list[tuple[int, float]]]:
    """The likeliest (token id, log probability) at each position."""
    if not {"top_logprob_ids", "top_logprobs"} <= outputs.keys():
        return []
    ids, values = outputs["top_logprob_ids"].array.tolist(), outputs["top_logprobs"].array.tolist()
    return [list(zip(*position, strict=True)) for position in zip(ids, values, strict=True)]
