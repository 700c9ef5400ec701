"""One OIP request, whatever its model is: text, a processor of the user's own, or tensors that are relayed.

Behind every front end that speaks the protocol, gRPC and REST. Text is recorded by the pipeline, with
what was said; of anything else the record has the tensors, those of a stream answer by answer. An answer is a
message, or the unparsed bytes of the predictor's. Raises MillraceError; closing a generator cancels the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing

from millrace.errors import ContextLengthError
from millrace.oip.stream_infer import FINAL
from millrace.payload.call import recorded
from millrace.payload.recording import Recording
from millrace.payload.tap import PayloadTap
from millrace.payload.tensors import answer_tensors, request_tensors, streamed_tensors
from millrace.rpc.call_context import CallContext, check_request_id
from millrace_protos import inference_pb2 as pb
from services.transformer.generation.chunks import joined
from services.transformer.generation.pipeline import Pipeline
from services.transformer.generation.text_tensors import TextAnswer, TextCall, read_request
from services.transformer.inference import processed
from services.transformer.inference.request import InferRequest
from services.transformer.models.catalogue import Catalogue
from services.transformer.models.models import Model, ProcessedModel, RelayedModel, TextModel
from services.transformer.predictors.relay import Relay

_BESIDE_PROMPT = 1024 * 1024  # Bytes of a request beside its prompt: more than they can be.


class Inference:
    """Owned by the event loop; one for all requests."""

    def __init__(self, pipeline: Pipeline, catalogue: Catalogue, relay: Relay, tap: PayloadTap) -> None:
        self._pipeline = pipeline
        self._catalogue = catalogue
        self._relay = relay
        self._tap = tap

    async def infer(self, request: InferRequest, call: CallContext) -> pb.ModelInferResponse | bytes:
        """The one answer; bytes are a serialized ModelInferResponse."""
        model = await self._find(request, call)
        if isinstance(model, TextModel):
            return await self._whole_text(model, request, self._read(model, request, call))
        with self._recorded(request, call) as recording:
            answer: pb.ModelInferResponse | bytes
            if isinstance(model, ProcessedModel):
                answer = await processed.infer(model, request, self._relay, call.deadline)
            else:
                answer = await self._relay.infer(request.data, call.deadline)
            recording.end("OK", outputs=answer_tensors(answer))
            await recording.flushed()
            return answer

    async def stream(
        self, request: InferRequest, call: CallContext
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        """The answers as they come, the last one marked; bytes are a serialized ModelStreamInferResponse."""
        model = await self._find(request, call)
        if isinstance(model, TextModel):
            answers = self._text(model, request, self._read(model, request, call))
        else:
            answers = self._tensors(model, request, call)
        async with aclosing(answers):
            async for answer in answers:
                yield answer

    async def _tensors(
        self, model: RelayedModel | ProcessedModel, request: InferRequest, call: CallContext
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        with self._recorded(request, call) as recording:
            answers: AsyncGenerator[pb.ModelInferResponse | bytes, None]
            if isinstance(model, ProcessedModel):
                answers = processed.stream(model, request, self._relay, call.deadline)
            else:
                answers = self._relay.stream(request.data, call.deadline)
            async with aclosing(answers):
                async for answer in answers:
                    recording.chunk("", outputs=streamed_tensors(answer))
                    await recording.flushed()
                    yield answer

    def _recorded(self, request: InferRequest, call: CallContext) -> AbstractContextManager[Recording]:
        inputs = request_tensors(request.received_data or request.message)
        return recorded(self._tap, call, request.model_name, inputs=inputs)

    async def _find(self, request: InferRequest, call: CallContext) -> Model:
        with self._pipeline.recording_refusals(call, request.model_name):
            check_request_id(request.id)
            return await self._catalogue.wait_for(request.model_name, request.model_version, call)

    def _read(self, model: TextModel, request: InferRequest, call: CallContext) -> TextCall:
        with self._pipeline.recording_refusals(call, request.model_name):
            size, context_length = len(request.received_data or b""), model.limits.context_length
            if size > model.tokenizer.most_bytes(context_length) + _BESIDE_PROMPT:
                raise ContextLengthError(
                    f"the request has {size} bytes, more than a prompt of {context_length} tokens can have"
                )
            return read_request(request.message, call)

    async def _whole_text(self, model: TextModel, request: InferRequest, text_call: TextCall) -> pb.ModelInferResponse:
        async with aclosing(self._pipeline.generate(text_call.text)) as chunks:
            return TextAnswer(request.message, text_call, model).response(joined([chunk async for chunk in chunks]))

    async def _text(
        self, model: TextModel, request: InferRequest, text_call: TextCall
    ) -> AsyncGenerator[pb.ModelInferResponse | bytes, None]:
        if not text_call.stream:
            response = await self._whole_text(model, request, text_call)
            response.parameters[FINAL].bool_param = True
            yield response
            return
        answer = TextAnswer(request.message, text_call, model)
        async with aclosing(self._pipeline.generate(text_call.text)) as chunks:
            async for chunk in chunks:
                response = answer.response(chunk)
                response.parameters[FINAL].bool_param = chunk.finish_reason is not None
                yield response
