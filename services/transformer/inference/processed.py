"""Requests to a processor: its preprocessing, the predictor's model, its postprocessing.

What the caller names and gets are the processor's tensors. Parameters that preprocessing leaves go to
the model, and those of the model's answers come back. The functions raise MillraceError; all of them
but the last two end with DeadlineError when the time is up, wherever it was spent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from millrace.errors import DeadlineError, InvalidRequestError
from millrace.oip.declared_tensors import DeclaredTensor, check_inputs, check_requested_outputs
from millrace.oip.tensor_threads import decoding
from millrace.oip.tensors import (
    BYTES,
    RawTensor,
    Tensor,
    add_input,
    add_output,
    add_raw_output,
    decode_raw,
    raw_inputs,
)
from millrace.processor import ProcessorRequest
from millrace.python_tensors import parameters_of
from millrace.sampling import set_parameters
from millrace_protos import inference_pb2 as pb
from millrace_protos import model_config_pb2
from services.transformer.inference.request import InferRequest
from services.transformer.models.models import ProcessedModel
from services.transformer.predictors.answers import outputs_of, predictor_answers
from services.transformer.predictors.relay import Relay

T = TypeVar("T")

_PLATFORM = "millrace_processor"


async def infer(
    model: ProcessedModel, request: InferRequest, relay: Relay, timeout_s: float | None
) -> pb.ModelInferResponse:
    """The one answer to a request."""
    clock = _Clock(timeout_s)
    asked = await clock.bound(_read(model, request))
    inner = await clock.bound(_before(model, request, asked))
    answer = await relay.infer(inner, clock.left_s)
    return await clock.bound(_after(model, request, asked, _parsed(pb.ModelInferResponse(), answer)))


async def stream(
    model: ProcessedModel, request: InferRequest, relay: Relay, timeout_s: float | None
) -> AsyncGenerator[pb.ModelInferResponse, None]:
    """The answers as they come; closing the generator cancels the request."""
    clock = _Clock(timeout_s)
    asked = await clock.bound(_read(model, request))
    inner = await clock.bound(_before(model, request, asked))
    async with aclosing(relay.stream(inner, clock.left_s)) as answers:
        async for answer in answers:
            response = _parsed(pb.ModelStreamInferResponse(), answer).infer_response
            yield await clock.bound(_after(model, request, asked, response))


def metadata_of(model: ProcessedModel) -> pb.ModelMetadataResponse:
    """The answer of ModelMetadata: the processor's tensors."""

    def told(tensors: Sequence[DeclaredTensor] | None) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        metadata = pb.ModelMetadataResponse.TensorMetadata
        return [metadata(name=each.name, datatype=each.datatype, shape=each.shape) for each in tensors or ()]

    processor = model.processor
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=model.versions,
        platform=_PLATFORM,
        inputs=told(processor.inputs),
        outputs=told(processor.outputs),
    )


def config_of(model: ProcessedModel, inner: model_config_pb2.ModelConfig) -> model_config_pb2.ModelConfig:
    """What ModelConfig says; `inner` is the configuration of the predictor's model."""
    config = model_config_pb2.ModelConfig(
        name=model.name,
        platform=_PLATFORM,
        backend="millrace",
        input=[
            model_config_pb2.ModelInput(
                name=each.name, data_type=_config_type(each.datatype), dims=each.shape, optional=each.optional
            )
            for each in model.processor.inputs or ()
        ],
        output=[
            model_config_pb2.ModelOutput(name=each.name, data_type=_config_type(each.datatype), dims=each.shape)
            for each in model.processor.outputs or ()
        ],
        model_transaction_policy=inner.model_transaction_policy,
    )
    config.parameters["model"].string_value = model.processor.model
    return config


class _Clock:
    """What a deadline has left."""

    def __init__(self, timeout_s: float | None) -> None:
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        if self._ends_at is None:
            return None
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed")
        return left

    async def bound(self, work: Awaitable[T]) -> T:
        """The result of the work, which has the time that is left."""
        try:
            async with asyncio.timeout(self.left_s):
                return await work
        except TimeoutError:
            raise DeadlineError("the deadline passed in the processor") from None


async def _read(model: ProcessedModel, request: InferRequest) -> ProcessorRequest:
    return await decoding(request.message.inputs, lambda: _decoded(model, request))


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
    return ProcessorRequest(request.id, inputs, parameters_of(request.parameters))


async def _before(model: ProcessedModel, request: InferRequest, asked: ProcessorRequest) -> bytes:
    """What goes to the predictor."""
    message = pb.ModelInferRequest(model_name=model.processor.model, id=request.id)
    for name, tensor in await model.processor.preprocess(asked):
        if isinstance(tensor, Tensor):
            add_input(message, tensor)
        else:
            message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
    set_parameters(message.parameters, asked.parameters)
    return message.SerializeToString()


async def _after(
    model: ProcessedModel, request: InferRequest, asked: ProcessorRequest, answer: pb.ModelInferResponse
) -> pb.ModelInferResponse:
    """The caller's answer, made of one of the model's."""
    tensors = await decoding(answer.outputs, lambda: outputs_of(answer))
    outputs = {name: tensor.array for name, tensor in tensors.items()}
    made = dict(await model.processor.postprocess(asked, outputs))
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


def _config_type(datatype: str) -> model_config_pb2.DataType.ValueType:
    """The configuration's own name of a datatype: TYPE_ and the protocol's, but for BYTES."""
    return model_config_pb2.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")
