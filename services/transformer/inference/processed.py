"""Requests to a processor: its preprocessing, the predictor's model, its postprocessing.

Callers send and receive the processor's tensors. The parameters after preprocessing go to the model, and those of the
model's answers are returned. The functions raise MillraceError, DeadlineError at any stage.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from millrace.deadline import Deadline
from millrace.errors import InvalidRequestError
from millrace.oip.declared_tensors import check_inputs, check_requested_outputs
from millrace.oip.model_description import ModelDescription
from millrace.oip.parameters import read_parameters, set_parameters
from millrace.oip.tensor_threads import decoding
from millrace.oip.tensors import RawTensor, Tensor, add_input, add_output, add_raw_output, decode_raw, raw_inputs
from millrace.processor import ProcessorRequest
from millrace_protos import inference_pb2 as pb
from services.transformer.inference.request import InferRequest
from services.transformer.models.models import ProcessedModel
from services.transformer.predictors.answers import outputs_of, predictor_answers
from services.transformer.predictors.relay import Relay

_PLATFORM = "millrace_processor"
_PASSED = "the deadline passed in the processor"


async def infer(
    model: ProcessedModel, request: InferRequest, relay: Relay, deadline: Deadline
) -> pb.ModelInferResponse:
    """The one answer to a request."""
    outer, inner = await _preprocessed(model, request, deadline)
    answer = await relay.infer(inner, deadline)
    async with deadline.scope(_PASSED):
        return await _postprocessed(model, request, outer, _parsed(pb.ModelInferResponse(), answer))


async def stream(
    model: ProcessedModel, request: InferRequest, relay: Relay, deadline: Deadline
) -> AsyncGenerator[pb.ModelInferResponse, None]:
    """The answers as they come; closing the generator cancels the request."""
    outer, inner = await _preprocessed(model, request, deadline)
    async with aclosing(relay.stream(inner, deadline)) as answers:
        async for answer in answers:
            parsed = _parsed(pb.ModelStreamInferResponse(), answer).infer_response
            async with deadline.scope(_PASSED):
                response = await _postprocessed(model, request, outer, parsed)
            yield response


def describe(model: ProcessedModel, is_decoupled: bool = False) -> ModelDescription:
    """The description for ModelMetadata and ModelConfig; only the latter knows whether the model is decoupled."""
    inputs, outputs = model.processor.inputs or (), model.processor.outputs or ()
    return ModelDescription(_PLATFORM, inputs, outputs, is_decoupled, parameters={"model": model.processor.model})


async def _preprocessed(
    model: ProcessedModel, request: InferRequest, deadline: Deadline
) -> tuple[ProcessorRequest, bytes]:
    """The request as the processor has it, and the serialized request to the predictor's model."""
    async with deadline.scope(_PASSED):
        outer = await decoding(request.message.inputs, lambda: _decoded(model, request))
        inner = pb.ModelInferRequest(model_name=model.processor.model, id=request.id)
        for name, tensor in await model.processor.preprocess(outer):
            if isinstance(tensor, Tensor):
                add_input(inner, tensor)
            else:
                inner.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
                inner.raw_input_contents.append(tensor.data)
        set_parameters(inner.parameters, outer.parameters)
        return outer, inner.SerializeToString()


def _decoded(model: ProcessedModel, request: InferRequest) -> ProcessorRequest:
    check_requested_outputs(request.message)
    raw = raw_inputs(request.message)
    processor = model.processor
    if processor.inputs is not None:
        check_inputs(raw, processor.inputs)
    if processor.outputs is not None:
        known = [each.name for each in processor.outputs]
        for output in request.message.outputs:
            if output.name not in known:
                raise InvalidRequestError(f"unknown output {output.name!r}; the model gives {', '.join(known)}")
    inputs = {name: decode_raw(name, tensor) for name, tensor in raw.items()}
    return ProcessorRequest(request.id, inputs, read_parameters(request.parameters))


async def _postprocessed(
    model: ProcessedModel, request: InferRequest, outer: ProcessorRequest, answer: pb.ModelInferResponse
) -> pb.ModelInferResponse:
    """The answer to the caller, made from one of the model's."""
    tensors = await decoding(answer.outputs, lambda: outputs_of(answer))
    outputs = {name: tensor.array for name, tensor in tensors.items()}
    made = dict(await model.processor.postprocess(outer, outputs))
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.versions[-1], id=request.id)
    for name in [output.name for output in request.message.outputs] or list(made):
        if name not in made:
            raise InvalidRequestError(f"unknown output {name!r}; the model gives {', '.join(made)}")
        tensor = made[name]
        if isinstance(tensor, RawTensor):
            add_raw_output(response, name, tensor)
        else:
            add_output(response, tensor)
    for key, parameter in answer.parameters.items():
        response.parameters[key].CopyFrom(parameter)
    return response


M = TypeVar("M", pb.ModelInferResponse, pb.ModelStreamInferResponse)


def _parsed(message: M, data: bytes) -> M:
    with predictor_answers():
        message.ParseFromString(data)
    return message
