"""One OIP request to any kind of model: text, a user's processor, or relayed tensors.

Used by the gRPC and REST front ends of the protocol. The pipeline records text generations; records of other requests
have the tensors, those of a stream answer by answer. An answer is a message, or the unparsed bytes of the predictor's.
Raises HeadraceError; closing a generator cancels the request.

For a client whose key limits tokens, the relay counts token ids: those that go to a predictor and those that come back.
A tensor of another name, of a model of the user's own, is not counted.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.clients import Client
from headrace.deadline import Deadline
from headrace.errors import ContextLengthError, HeadraceError, InvalidRequestError
from headrace.oip.model_description import INPUT_IDS, OUTPUT_IDS
from headrace.oip.raw_contents import split
from headrace.oip.stream_infer import FINAL
from headrace.payload.call import recorded
from headrace.payload.recording import Recording
from headrace.payload.tap import PayloadTap
from headrace.payload.tensors import answer_tensors, request_tensors, streamed_tensors
from headrace.rpc.server.call_context import CallContext, check_request_id
from headrace_protos import inference_pb2 as pb
from headrace_transformer.generation.chunks import joined
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.text_tensors import TextAnswer, TextCall, read_request
from headrace_transformer.generation.token_quota import Reservation, TokenQuota
from headrace_transformer.inference import processed
from headrace_transformer.inference.request import InferRequest
from headrace_transformer.models.models import Model, ProcessedModel, RelayedModel, TextModel
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.routing.router import Answering, Router

_BESIDE_PROMPT = 1024 * 1024  # An upper bound of a request's bytes besides its prompt.
_MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, eq=False)
class Inference:
    """Owned by the event loop; one for all requests."""

    pipeline: Pipeline
    router: Router
    predictor: PredictorClient
    tap: PayloadTap
    quota: TokenQuota

    async def infer(self, request: InferRequest, call: CallContext) -> pb.ModelInferResponse | bytes:
        """The one answer; bytes are a serialized ModelInferResponse."""
        answering = await self._find(request, call)
        if isinstance(answering.model, TextModel):
            return await self._whole_text(request, self._read(answering.model, request, call))
        with self._recorded(request, call) as recording:
            while True:  # Until the model answers, or one that its route falls back to.
                relay, model = self._relay_of(answering.model, call, recording), answering.model
                try:
                    if isinstance(model, ProcessedModel):
                        answer = await processed.infer(model, request, relay, call.deadline)
                    else:
                        data = self._routed(request, call).data
                        answer = await relay.infer(data, call.deadline, answering.wait_s)
                    break
                except HeadraceError as error:
                    answering = self.router.fall_back(answering, call, error)
            self.router.answered(answering)
            recording.served_model = answering.served
            recording.end("OK", outputs=answer_tensors(answer))
            await recording.flushed()
            return self._named(answer, request, call)

    async def stream(
        self, request: InferRequest, call: CallContext
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        """The answers as they come, the last one marked; bytes are a serialized ModelStreamInferResponse."""
        answering = await self._find(request, call)
        if isinstance(answering.model, TextModel):
            answers = self._text(request, self._read(answering.model, request, call))
        else:
            answers = self._tensors(answering, request, call)
        async with aclosing(answers):
            async for answer in answers:
                yield answer

    async def _tensors(
        self, answering: Answering, request: InferRequest, call: CallContext
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        with self._recorded(request, call) as recording:
            answers: AsyncGenerator[pb.ModelInferResponse | bytes, None]
            relay = self._relay_of(answering.model, call, recording)
            if isinstance(answering.model, ProcessedModel):
                answers = processed.stream(answering.model, request, relay, call.deadline)
            else:
                answers = relay.stream(self._routed(request, call).data, call.deadline)
            self.router.answered(answering)
            recording.served_model = answering.served
            async with aclosing(answers):
                async for answer in answers:
                    recording.chunk("", outputs=streamed_tensors(answer))
                    await recording.flushed()
                    yield self._named(answer, request, call, is_streamed=True)

    def _relay_of(self, model: Model, call: CallContext, recording: Recording) -> processed.Relay:
        if not call.client.counts_tokens:
            return self.predictor
        generates = isinstance(model, RelayedModel) and model.generates
        return CountedRelay(self.predictor, self.quota, call.client, recording, generates)

    def _routed(self, request: InferRequest, call: CallContext) -> InferRequest:
        """The request with the model that the route chose."""
        routed = call.routed.get(request.model_name)
        return request if routed is None else request.for_model(routed[0])

    def _named(
        self, answer: pb.ModelInferResponse | bytes, request: InferRequest, call: CallContext, is_streamed: bool = False
    ) -> pb.ModelInferResponse | bytes:
        """The answer under the name in the request; protobuf uses the last value of a repeated scalar field."""
        if request.model_name not in call.routed:
            return answer
        if not isinstance(answer, bytes):
            answer.model_name = request.model_name
            return answer
        name = pb.ModelInferResponse(model_name=request.model_name)
        return answer + (pb.ModelStreamInferResponse(infer_response=name) if is_streamed else name).SerializeToString()

    def _recorded(self, request: InferRequest, call: CallContext) -> AbstractContextManager[Recording]:
        inputs = request_tensors(request.data)
        return recorded(self.tap, call, request.model_name, inputs=inputs)

    async def _find(self, request: InferRequest, call: CallContext) -> Answering:
        with self.pipeline.recording_refusals(call, request.model_name):
            check_request_id(request.id)
            return await self.router.wait_for(request.model_name, request.model_version, call)

    def _read(self, model: TextModel, request: InferRequest, call: CallContext) -> TextCall:
        with self.pipeline.recording_refusals(call, request.model_name):
            size, context_length = len(request.data), model.limits.context_length
            if size > model.tokenizer.most_bytes(context_length) + _BESIDE_PROMPT:
                raise ContextLengthError(
                    f"the request has {size} bytes, more than a prompt of {context_length} tokens can have"
                )
            return read_request(request.message, call)

    async def _whole_text(self, request: InferRequest, text_call: TextCall) -> pb.ModelInferResponse:
        async with aclosing(self.pipeline.generate(text_call.text)) as chunks:
            return TextAnswer(request.message, text_call).response(joined([chunk async for chunk in chunks]))

    async def _text(
        self, request: InferRequest, text_call: TextCall
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        if not text_call.stream:
            response = await self._whole_text(request, text_call)
            response.parameters[FINAL].bool_param = True
            yield response
            return
        answer = TextAnswer(request.message, text_call)
        async with aclosing(self.pipeline.generate(text_call.text)) as chunks:
            async for chunk in chunks:
                response = answer.response(chunk)
                response.parameters[FINAL].bool_param = chunk.end is not None
                yield response


@dataclass(frozen=True)
class CountedRelay:
    """Passes the requests of a client whose key limits tokens.

    Raises what TokenQuota raises, and InvalidRequestError where a model that generates could take any number.
    """

    predictor: PredictorClient
    quota: TokenQuota
    client: Client
    recording: Recording
    generates: bool

    async def infer(self, request: bytes, deadline: Deadline, wait_s: float | None = None) -> bytes:
        async with self._charged(request) as reservation:
            answer = await self.predictor.infer(request, deadline, wait_s)
            reservation.used = _ids(split(pb.ModelInferResponse, answer)[0].outputs, OUTPUT_IDS)
            return answer

    async def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        async with (
            self._charged(request) as reservation,
            aclosing(self.predictor.stream(request, deadline)) as answers,
        ):
            async for answer in answers:
                message = pb.ModelStreamInferResponse.FromString(answer).infer_response
                reservation.used += _ids(message.outputs, OUTPUT_IDS)
                yield answer

    @asynccontextmanager
    async def _charged(self, request: bytes) -> AsyncIterator[Reservation]:
        prompt_tokens, max_tokens = self._wanted(request)
        with await self.quota.charged(self.client, prompt_tokens, max_tokens) as reservation:
            self.recording.prompt_tokens = prompt_tokens
            try:
                yield reservation
            finally:
                self.recording.completion_tokens = reservation.used

    def _wanted(self, request: bytes) -> tuple[int, int]:
        """The tokens of the prompt, and of the answer at most."""
        message, _ = split(pb.ModelInferRequest, request)
        most: Mapping[str, pb.InferParameter] = message.parameters
        if self.generates and _MAX_TOKENS not in most:
            raise InvalidRequestError(
                f"{_MAX_TOKENS} is needed: the key of {self.client.name} has a limit of tokens", param=_MAX_TOKENS
            )
        return _ids(message.inputs, INPUT_IDS), max(0, most[_MAX_TOKENS].int64_param) if _MAX_TOKENS in most else 0


def _ids(tensors: Iterable[Any], name: str) -> int:
    shapes = (tensor.shape for tensor in tensors if tensor.name == name)
    return sum(math.prod(shape) for shape in shapes if min(shape, default=0) > 0)
