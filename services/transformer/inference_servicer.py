"""OIP v2 for text models, with the tensor names of Triton's vLLM backend.

Inputs: `text_input` BYTES [1]; optional `stream` BOOL [1], `sampling_parameters` BYTES [1] (JSON),
`exclude_input_in_output` BOOL [1] (default true). Output: `text_output` BYTES [1]. Sampling
parameters are read from the request's `parameters` too, which win. `ModelInfer` answers whole,
`ModelStreamInfer` streams unless `stream` is false.

Requests to a model that needs no text processing are relayed; one stream may mix both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from millrace import __version__
from millrace.errors import InvalidRequestError
from millrace.interceptors import Context
from millrace.protos import inference_pb2 as pb
from millrace.protos import inference_pb2_grpc, model_config_pb2
from millrace.sampling import parameters_of, set_parameters
from millrace.stream_infer import FINAL, errors_as_status, multiplex
from millrace.tensors import BYTES, Tensor, add_output, bytes_tensor, decode_inputs
from services.transformer.calls import request_id_of
from services.transformer.catalogue import VERSION, Catalogue
from services.transformer.pipeline import Origin, Pipeline, TextChunk, TextRequest
from services.transformer.relay import Relay

_SERVICE = "inference.GRPCInferenceService"
_TEXT_INPUT = "text_input"
_TEXT_OUTPUT = "text_output"
_INPUTS = {_TEXT_INPUT: BYTES, "stream": "BOOL", "sampling_parameters": BYTES, "exclude_input_in_output": "BOOL"}
_PLATFORM = "millrace_text"


@dataclass(frozen=True)
class _Asked:
    """A parsed request."""

    text: TextRequest
    stream: bool
    echo: str  # What goes before the answer: the prompt or nothing.


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, pipeline: Pipeline, catalogue: Catalogue, relay: Relay) -> None:
        self._pipeline = pipeline
        self._catalogue = catalogue
        self._relay = relay

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._catalogue.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        known = request.name in self._catalogue.names and request.version in ("", VERSION)
        ready = self._catalogue.ready and known
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="millrace", version=__version__, extensions=["model_configuration"])

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        if self._catalogue.is_relayed(request.name, request.version):
            return await self._relay.metadata(request)
        model = self._catalogue.get(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform=_PLATFORM,
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in _INPUTS.items()],
            outputs=[tensor(name=_TEXT_OUTPUT, datatype=BYTES, shape=[1])],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        if self._catalogue.is_relayed(request.name, request.version):
            return await self._relay.config(request)
        model = self._catalogue.get(request.name, request.version)
        kinds = {BYTES: model_config_pb2.TYPE_STRING, "BOOL": model_config_pb2.TYPE_BOOL}
        tensor_in, tensor_out = model_config_pb2.ModelInput, model_config_pb2.ModelOutput
        config = model_config_pb2.ModelConfig(
            name=model.name,
            platform=_PLATFORM,
            backend="millrace",
            input=[
                tensor_in(name=name, data_type=kinds[datatype], dims=[1], optional=name != _TEXT_INPUT)
                for name, datatype in _INPUTS.items()
            ],
            output=[tensor_out(name=_TEXT_OUTPUT, data_type=kinds[BYTES], dims=[1])],
            model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
        )
        config.parameters["context_length"].string_value = str(
            (await self._catalogue.limits(model.name)).context_length
        )
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        return await self._relay.statistics(request)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        origin = _origin(request, context, "ModelInfer")
        if self._is_relayed(request, origin):
            return await self._relay.infer(request, origin, context.time_remaining())
        return await self._whole(request, self._parse(request, origin, context))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        async def answer(request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelInferResponse, None]:
            origin = _origin(request, context, "ModelStreamInfer")
            if self._is_relayed(request, origin):
                async with aclosing(self._relay.stream(request, origin, context.time_remaining())) as relayed:
                    async for response in relayed:
                        yield response
                return
            asked = self._parse(request, origin, context)
            if not asked.stream:
                response = await self._whole(request, asked)
                response.parameters[FINAL].bool_param = True
                yield response
                return
            echo = asked.echo
            async with aclosing(self._pipeline.generate(asked.text)) as chunks:
                async for chunk in chunks:
                    response = _response(request, echo + chunk.text, chunk)
                    response.parameters[FINAL].bool_param = chunk.finish_reason is not None
                    echo = ""
                    yield response

        async with aclosing(multiplex(request_iterator, answer, errors_as_status(context))) as responses:
            async for response in responses:
                yield response

    def _is_relayed(self, request: pb.ModelInferRequest, origin: Origin) -> bool:
        with self._pipeline.recording_refusals(origin, request.model_name):
            return self._catalogue.is_relayed(request.model_name, request.model_version)

    def _parse(self, request: pb.ModelInferRequest, origin: Origin, context: Context) -> _Asked:
        with self._pipeline.recording_refusals(origin, request.model_name):
            return _parse(request, origin, context.time_remaining())

    async def _whole(self, request: pb.ModelInferRequest, asked: _Asked) -> pb.ModelInferResponse:
        text, last = asked.echo, None
        async with aclosing(self._pipeline.generate(asked.text)) as chunks:
            async for last in chunks:
                text += last.text
        return _response(request, text, last)


def _origin(request: pb.ModelInferRequest, context: Context, method: str) -> Origin:
    return Origin(f"{_SERVICE}/{method}", request_id_of(context, request.id))


def _parse(request: pb.ModelInferRequest, origin: Origin, timeout_s: float | None) -> _Asked:
    tensors = decode_inputs(request)
    for name, tensor in tensors.items():
        if name not in _INPUTS:
            raise InvalidRequestError(f"unknown input {name!r}; a text model takes {', '.join(_INPUTS)}")
        if tensor.datatype != _INPUTS[name]:
            raise InvalidRequestError(f"{name} must be {_INPUTS[name]}, not {tensor.datatype}")
        if tensor.array.size != 1:
            raise InvalidRequestError(f"{name} must hold one element, not {tensor.array.size}")
    for output in request.outputs:
        if output.name != _TEXT_OUTPUT:
            raise InvalidRequestError(f"unknown output {output.name!r}; a text model gives {_TEXT_OUTPUT}")
    if _TEXT_INPUT not in tensors:
        raise InvalidRequestError(f"input {_TEXT_INPUT!r} is missing")
    prompt = _text(tensors[_TEXT_INPUT])
    sampling = _sampling_object(tensors.get("sampling_parameters")) | parameters_of(request.parameters)
    text = TextRequest(
        origin=origin,
        model=request.model_name,
        version=request.model_version,
        prompt=prompt,
        stop=_stop(sampling.pop("stop", None)),
        sampling=sampling,
        timeout_s=timeout_s,
    )
    exclude = _flag(tensors.get("exclude_input_in_output"), default=True)
    return _Asked(text, _flag(tensors.get("stream"), default=True), "" if exclude else prompt)


def _sampling_object(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    try:
        values = orjson.loads(_text(tensor))
    except ValueError as error:
        raise InvalidRequestError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("sampling_parameters must be a JSON object")
    return values


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise InvalidRequestError("stop must be a string or a list of strings")
    return tuple(values)


def _text(tensor: Tensor) -> str:
    try:
        return str(tensor.array.ravel()[0], "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{tensor.name} is not UTF-8") from None


def _flag(tensor: Tensor | None, default: bool) -> bool:
    return default if tensor is None else bool(tensor.array.ravel()[0])


def _response(request: pb.ModelInferRequest, text: str, last: TextChunk | None) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    add_output(response, bytes_tensor(_TEXT_OUTPUT, [text.encode()]))
    if last is not None and last.finish_reason is not None:
        set_parameters(response.parameters, {"finish_reason": last.finish_reason})
    return response
