"""Requests to a processor: its preprocessing, the predictor's model, its postprocessing.

Callers send and receive the processor's tensors. The parameters after preprocessing go to the model, and those of the
model's answers are returned. The functions raise HeadraceError, DeadlineError at any stage.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, TypeVar

from headrace.deadline import Deadline
from headrace.oip.model_description import ModelDescription, check_inputs, check_names, check_requested_outputs
from headrace.oip.parameters import read_parameters, set_parameters
from headrace.oip.raw_contents import Contents, joined, raw_contents, split
from headrace.oip.tensors import BYTES, MAX_BYTES_ELEMENTS, decode
from headrace.processor import ProcessorRequest
from headrace_protos import inference_pb2 as pb
from headrace_transformer.inference.request import InferRequest
from headrace_transformer.models.models import ProcessedModel
from headrace_transformer.predictors.oip.oip_call import outputs_of, predictor_answers

_PLATFORM = "headrace_processor"

_FIXED = ("fp32_contents", "fp64_contents")  # Numbers of fixed size, which are decoded together.
_AT_ONCE = 4096  # Elements that take 2 ms.
# For many elements: a change of threads costs more than few. The bound on requests in flight bounds its queue.
_decoders = ThreadPoolExecutor(1, thread_name_prefix="decode-tensors")

T = TypeVar("T")


class Relay(Protocol):
    """What passes serialized requests to predictors, and their answers back: see PredictorClient."""

    async def infer(self, request: bytes, deadline: Deadline, wait_s: float | None = None) -> bytes: ...

    def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]: ...


async def infer(model: ProcessedModel, request: InferRequest, relay: Relay, deadline: Deadline) -> bytes:
    """The one answer to a request, a serialized ModelInferResponse."""
    outer, inner = await _preprocessed(model, request, deadline)
    answer = await relay.infer(inner, deadline)
    with predictor_answers():
        message, contents = split(pb.ModelInferResponse, answer)
    return joined(*await _postprocessed(model, outer, message, contents, deadline))


async def stream(
    model: ProcessedModel, request: InferRequest, relay: Relay, deadline: Deadline
) -> AsyncGenerator[pb.ModelInferResponse, None]:
    """The answers as they come; closing the generator cancels the request."""
    outer, inner = await _preprocessed(model, request, deadline)
    async with aclosing(relay.stream(inner, deadline)) as answers:
        async for answer in answers:
            with predictor_answers():
                message = pb.ModelStreamInferResponse.FromString(answer).infer_response
            response, contents = await _postprocessed(model, outer, message, message.raw_output_contents, deadline)
            response.raw_output_contents.extend(map(bytes, contents))
            yield response


def describe(model: ProcessedModel, is_decoupled: bool = False) -> ModelDescription:
    """The description for ModelMetadata and ModelConfig; only the latter knows whether the model is decoupled."""
    inputs, outputs = model.processor.inputs or (), model.processor.outputs or ()
    return ModelDescription(_PLATFORM, inputs, outputs, is_decoupled, parameters={"model": model.processor.model})


class _Request(NamedTuple):
    """A request as the processor has it, and the names of the outputs that its caller wants."""

    read: ProcessorRequest
    outputs: Sequence[str]


async def _preprocessed(model: ProcessedModel, request: InferRequest, deadline: Deadline) -> tuple[_Request, bytes]:
    """The request, and the serialized one to the predictor's model."""
    message, contents = request.without_contents()
    outer = await _decoding(message.inputs, lambda: _decoded(model, request, message, contents), deadline)
    tensors = await model.processor.preprocess(outer.read, deadline)
    inner = pb.ModelInferRequest(model_name=model.processor.model, id=request.id)
    for name, tensor in tensors:
        inner.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
    set_parameters(inner.parameters, outer.read.parameters)
    return outer, joined(inner, [raw_contents(tensor) for _, tensor in tensors])


def _decoded(
    model: ProcessedModel, request: InferRequest, message: pb.ModelInferRequest, contents: Sequence[Contents]
) -> _Request:
    check_requested_outputs(message)
    tensors = decode(message.inputs, contents, "input")
    processor = model.processor
    if processor.inputs is not None:
        check_inputs(tensors, processor.inputs)
    outputs = [output.name for output in message.outputs]
    if processor.outputs is not None:
        check_names("output", outputs, [each.name for each in processor.outputs])
    inputs = {name: tensor.array for name, tensor in tensors.items()}
    for array in inputs.values():
        if array.dtype != object:
            array.flags.writeable = False  # As those of raw contents are.
    return _Request(ProcessorRequest(request.id, inputs, read_parameters(request.parameters)), outputs)


async def _postprocessed(
    model: ProcessedModel,
    outer: _Request,
    answer: pb.ModelInferResponse,
    contents: Sequence[Contents],
    deadline: Deadline,
) -> tuple[pb.ModelInferResponse, Sequence[Contents]]:
    """The answer to the caller, made from one of the model's, and the raw contents of its outputs."""
    tensors = await _decoding(answer.outputs, lambda: outputs_of(answer, contents), deadline)
    outputs = {name: tensor.array for name, tensor in tensors.items()}
    results = dict(await model.processor.postprocess(outer.read, outputs, deadline))
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.versions[-1], id=outer.read.id)
    written: list[Contents] = []
    check_names("output", outer.outputs, results)
    for name in outer.outputs or results:
        tensor = results[name]
        response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        written.append(raw_contents(tensor))
    for key, parameter in answer.parameters.items():
        response.parameters[key].CopyFrom(parameter)
    return response, written


async def _decoding(described: Iterable[Any], decode: Callable[[], T], deadline: Deadline) -> T:
    """The result of `decode`, which decodes these inputs or outputs; cancelled, it runs to its end.

    Raises DeadlineError if the deadline passes before.
    """
    if elements_by_one(described) <= _AT_ONCE:
        return decode()
    async with deadline.scope():
        return await asyncio.get_running_loop().run_in_executor(_decoders, decode)


def elements_by_one(described: Iterable[Any]) -> int:
    """How many elements of inputs or outputs are decoded one by one, at some 0.5 µs each; others take no time."""
    count = 0
    for description in described:
        if description.datatype == BYTES:
            size = math.prod(map(abs, description.shape[:32]))
            count += size if size <= MAX_BYTES_ELEMENTS else 0  # More are refused without decoding.
        elif description.HasField("contents"):
            count += sum(len(values) for field, values in description.contents.ListFields() if field.name not in _FIXED)
    return count
