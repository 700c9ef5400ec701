"""A generation as one `ModelStreamInfer` call at a gRPC server that is not ours, and what its answers hold.

Errors in a predictor's answer are the predictor's fault, never the caller's.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from headrace.deadline import Deadline
from headrace.errors import HeadraceError, HopBrokenError, InvalidRequestError, RequestFailedError
from headrace.oip.model_description import INPUT_IDS, OUTPUT_IDS
from headrace.oip.parameters import read_sampling, set_parameters
from headrace.oip.raw_contents import Contents
from headrace.oip.tensors import Tensor, add_input, decode, decode_outputs, dtype_of
from headrace.payload.call import RECORDED
from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import RESTRICTIONS, SamplingParameters
from headrace_protos import inference_pb2, steps_pb2
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.discovery.descriptions import Dialect


class BrokenAnswerError(HopBrokenError):
    """The predictor breaks the protocol: the same request would have the same answer, so it is not sent again."""


@contextmanager
def predictor_answers() -> Iterator[None]:
    """Converts errors of the block, which parses an answer, to BrokenAnswerError."""
    try:
        yield
    except InvalidRequestError as error:
        raise BrokenAnswerError(f"the predictor's answer: {error.message}", hop="predictor") from None
    except (DecodeError, TypeError, ValueError, OverflowError):
        raise BrokenAnswerError("the predictor's answer is not the message that it must be", hop="predictor") from None


def outputs_of(response: inference_pb2.ModelInferResponse, contents: Sequence[Contents]) -> dict[str, Tensor]:
    """The response's outputs by name, from its raw contents."""
    with predictor_answers():
        return decode(response.outputs, contents, "output")


def numbers_of(outputs: Mapping[str, Tensor], name: str, kinds: str) -> list[Any]:
    """The values of an output, flat; empty where there is none. `kinds` are the numpy kinds that it may have."""
    if name not in outputs:
        return []
    array = outputs[name].array
    if array.dtype.kind not in kinds:
        raise BrokenAnswerError(f"the predictor's {name} is {outputs[name].datatype}", hop="predictor")
    values: list[Any] = array.ravel().tolist()
    return values


# Triton's own switch: an error ends the call with its status, not with a text inside the stream.
ERRORS_AS_STATUS = ("triton_grpc_error", "true")

_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")
_END_TIMEOUT_S = 1.0


class OipCall:
    """See the module. Such a call resumes nothing."""

    is_accepted = runs_alone = False
    fingerprint = predictor = ""

    def __init__(
        self,
        stream: grpc.aio.UnaryStreamMultiCallable[
            inference_pb2.ModelInferRequest, inference_pb2.ModelStreamInferResponse
        ],
        submission: steps_pb2.Submission,
        sampling: SamplingParameters,
        dialect: Dialect,
        deadline: Deadline,
        span: ClientSpan,
    ) -> None:
        request = inference_pb2.ModelInferRequest(model_name=submission.model, id=submission.request_id)
        ids = np.array(submission.prompt_ids, dtype=dtype_of(INPUT_IDS, dialect.datatype))
        add_input(request, Tensor(INPUT_IDS, dialect.datatype, ids[None] if dialect.batched else ids))
        # Triton's servers read a priority too, with a meaning of their own; the form of answers is ours alone.
        unused = {name for name in RESTRICTIONS if not getattr(sampling, name)}
        left_out = {"priority", "structured_outputs"} | unused
        set_parameters(request.parameters, sampling.model_dump(exclude_none=True, exclude=left_out))
        with span.of_next_call():
            self._call = stream(request, timeout=deadline.left(), metadata=(ERRORS_AS_STATUS, RECORDED))
        self._messages = aiter(self._call)
        self._reports_reason = dialect.reports_reason
        self._prompt_tokens, self._max_tokens = len(submission.prompt_ids), sampling.max_tokens or 0
        self._span = span
        self._produced = 0

    async def read(self) -> TokenChunk:
        """The next tokens; raises HeadraceError."""
        message = await anext(self._messages, None)
        if message is None:
            return self._last()
        self._span.message()
        if message.error_message:
            raise RequestFailedError(message.error_message, hop="predictor")
        with predictor_answers():
            chunk = _chunk(message.infer_response, decode_outputs(message.infer_response))
        self._produced += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            await self._until_end()
        return chunk

    def close(self) -> None:
        """Cancels the call unless it has ended."""
        self._call.cancel()

    def _last(self) -> TokenChunk:
        """The end of a server whose last answer has no finish_reason: its call has ended well."""
        if self._reports_reason:
            raise HopBrokenError("the predictor ended the stream before its last token", hop="predictor")
        reason = "length" if self._produced >= self._max_tokens else "stop"
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._produced)
        return TokenChunk(finish_reason=reason, usage=usage)

    async def _until_end(self) -> None:
        """Reads the call's status, so that it ends as OK and not as cancelled; the answer does not depend on it."""
        with suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                async for _ in self._messages:
                    pass


def _chunk(response: inference_pb2.ModelInferResponse, outputs: Mapping[str, Tensor]) -> TokenChunk:
    parameters = read_sampling(response.parameters)
    reason = parameters.get("finish_reason")
    usage = None
    if reason is not None:
        usage = Usage(**{name: int(parameters.get(name, 0)) for name in _USAGE})
    cached = parameters.get("cached_tokens")
    return TokenChunk(
        numbers_of(outputs, OUTPUT_IDS, "iu"),
        numbers_of(outputs, "logprobs", "f"),
        _top_logprobs(outputs),
        reason,
        usage,
        None if cached is None else int(cached),
    )


def _top_logprobs(outputs: Mapping[str, Tensor]) -> list[list[tuple[int, float]]]:
    """The likeliest (token id, log probability) at each position."""
    if not {"top_logprob_ids", "top_logprobs"} <= outputs.keys():
        return []
    ids, values = outputs["top_logprob_ids"].array.tolist(), outputs["top_logprobs"].array.tolist()
    return [list(zip(*position, strict=True)) for position in zip(ids, values, strict=True)]
