"""The V2 protocol's REST with Triton's extensions: bodies to the messages of the gRPC servicer, and back.

Only bodies are read and written here: each method calls its gRPC counterpart in the `InferenceServicer`. The gateway
makes a REST error of the status and message of its exceptions, see frontends/http.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from headrace.errors import HeadraceError, InvalidRequestError, NotFoundError, NotImplementedMethodError, NotReadyError
from headrace.rpc import Context
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import CallContext, call_context
from headrace_protos import inference_pb2 as pb
from headrace_protos import rest_pb2_grpc
from headrace_protos.rest_pb2 import ModelBody, ModelRequest, SharedMemoryRequest
from headrace_transformer.frontends.grpc.inference_servicer import InferenceServicer, serialized
from headrace_transformer.frontends.http import EVENTS, JSON, Bodies, Events, json_body, one_line, rest_method
from headrace_transformer.frontends.v2_rest import documents
from headrace_transformer.frontends.v2_rest.body_tensors import HEADER_LENGTH
from headrace_transformer.frontends.v2_rest.generate_body import (
    parse_generate,
    read_generate,
    write_answer,
    write_parsed_answer,
)
from headrace_transformer.frontends.v2_rest.infer_body import (
    CONTENT_ENCODING,
    DEFLATE,
    InferCall,
    inflate,
    inflated,
    is_small,
    parse_body,
    parsed_answer,
    read_body,
    read_raw_body,
    write_body,
    write_parsed_body,
)
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.inference.request import InferRequest
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses

_SERVICE = "headrace.rest.v1.OpenInference"
_BINARY = "application/octet-stream"
_SHARED_MEMORY = ("systemsharedmemory", "cudasharedmemory", "xpusharedmemory")

T = TypeVar("T")


def v2_error(error: HeadraceError) -> dict[str, Any]:
    """The body of the V2 protocol's errors."""
    return {"error": error.message}


class OpenInferenceServicer(rest_pb2_grpc.OpenInferenceServicer):
    """After `keep_alive_s` of silence a stream of events gets a comment; 0: never. `links` are the predictors."""

    def __init__(
        self,
        inference: InferenceServicer,
        pipeline: Pipeline,
        bodies: BodyProcesses,
        links: Links,
        keep_alive_s: float = 15.0,
    ) -> None:
        self._keep_alive_s = keep_alive_s
        self._inference = inference
        self._pipeline = pipeline
        self._bodies = bodies
        self._links = links

    # ------------------------------------------------------------------ the server and its models

    async def ServerMetadata(self, request: Empty, context: Context) -> HttpBody:
        answer = await self._inference.ServerMetadata(pb.ServerMetadataRequest(), context)
        return json_body(documents.plain(answer))

    async def Live(self, request: Empty, context: Context) -> HttpBody:
        answer = await self._inference.ServerLive(pb.ServerLiveRequest(), context)
        return json_body({"live": answer.live})

    async def Ready(self, request: Empty, context: Context) -> HttpBody:
        """200 where a generation would work now, else 503: for load balancers."""
        answer = await self._inference.ServerReady(pb.ServerReadyRequest(), context)
        _set_readiness_status(answer.ready)
        return json_body({"ready": answer.ready})

    async def ModelReady(self, request: ModelRequest, context: Context) -> HttpBody:
        """As `Ready`, and 404 where there is no such model or version."""
        message = pb.ModelReadyRequest(name=request.model, version=request.version)
        answer = await self._inference.ModelReady(message, context)
        if not answer.ready:
            await self._metadata(request, context)  # Raises NotFoundError if there is none.
        _set_readiness_status(answer.ready)
        return json_body({"name": request.model, "ready": answer.ready})

    async def ModelMetadata(self, request: ModelRequest, context: Context) -> HttpBody:
        return json_body(documents.plain(await self._metadata(request, context)))

    async def ModelConfig(self, request: ModelRequest, context: Context) -> HttpBody:
        message = pb.ModelConfigRequest(name=request.model, version=request.version)
        return json_body(documents.plain((await self._inference.ModelConfig(message, context)).config))

    async def ModelStatistics(self, request: ModelRequest, context: Context) -> HttpBody:
        message = pb.ModelStatisticsRequest(name=request.model, version=request.version)
        return json_body(documents.plain(await self._inference.ModelStatistics(message, context), unset=True))

    # ------------------------------------------------------------------ inference

    async def Infer(self, request: ModelBody, context: Context) -> HttpBody:
        call = call_context(context, f"{_SERVICE}/Infer")
        infer_call = await self._read(self._read_infer, request, call)
        message = InferRequest.received(infer_call.data)
        answer = await self._inference.infer(message, call.with_id(message.id))
        body, header_length = await self._write_infer(infer_call, answer, call)
        if header_length is None:
            return HttpBody(content_type=JSON, data=body)
        head_of_call().add((HEADER_LENGTH, str(header_length)))
        return HttpBody(content_type=_BINARY, data=body)

    async def Generate(self, request: ModelBody, context: Context) -> HttpBody:
        call = call_context(context, f"{_SERVICE}/Generate")
        message = await self._read(self._read_generate, request, call)
        answer = await self._inference.infer(message, call.with_id(message.id))
        return HttpBody(content_type=JSON, data=await self._write(answer, call))

    @rest_method(v2_error)
    async def GenerateStream(self, request: ModelBody, call: CallContext) -> Bodies:
        yield Events(self._keep_alive_s)
        message = await self._read(self._read_generate, request, call)
        async with aclosing(self._inference.answers(message, call.with_id(message.id))) as responses:
            async for response in responses:
                if response.outputs:  # A response without outputs only marks the end.
                    data = await self._write(response, call)
                    yield HttpBody(content_type=EVENTS, data=b"data: " + one_line(data) + b"\n\n")

    async def _read(
        self, read: Callable[[ModelBody, CallContext], Awaitable[T]], request: ModelBody, call: CallContext
    ) -> T:
        """Reads a body; a refused one is recorded like any other request."""
        with self._pipeline.recording_refusals(call, request.model):
            return await read(request, call)

    async def _read_infer(self, request: ModelBody, call: CallContext) -> InferCall:
        data, length = await self._body(request, call), _header_length(call)
        if length == 0:
            metadata = await self._metadata_of_called(request, call)
            return read_raw_body(request.model, request.version, metadata, data)
        if min(len(data), len(data) if length is None else length) <= SMALL_BYTES:
            return read_body(request.model, request.version, data, length)
        arguments = (request.model, request.version, length)
        (binary, named), message = await self._bodies.run(parse_body, arguments, data, call.deadline)
        return InferCall(message, binary, named)

    async def _read_generate(self, request: ModelBody, call: CallContext) -> InferRequest:
        metadata = await self._metadata_of_called(request, call)
        data = await self._body(request, call)
        if len(data) <= SMALL_BYTES:
            return InferRequest.parsed(read_generate(request.model, request.version, metadata, data))
        arguments = (request.model, request.version, metadata.SerializeToString())
        _, message = await self._bodies.run(parse_generate, arguments, data, call.deadline)
        return InferRequest.received(message)

    async def _body(self, request: ModelBody, call: CallContext) -> bytes:
        data: bytes = request.body.data
        if (CONTENT_ENCODING, DEFLATE) not in call.metadata:
            return data
        if is_small(data, SMALL_BYTES):
            return inflated(data)
        return (await self._bodies.run(inflate, (), data, call.deadline))[1]

    async def _write_infer(
        self, infer_call: InferCall, answer: pb.ModelInferResponse | bytes, call: CallContext
    ) -> tuple[bytes, int | None]:
        if not infer_call.wants_json or _size(answer) <= SMALL_BYTES:
            return write_body(infer_call, _parsed(answer))
        arguments = (infer_call.binary, infer_call.named)
        length, body = await self._bodies.run(write_parsed_body, arguments, serialized(answer), call.deadline)
        return body, length

    async def _write(self, answer: pb.ModelInferResponse | bytes, call: CallContext) -> bytes:
        if _size(answer) <= SMALL_BYTES:
            return write_answer(_parsed(answer))
        return (await self._bodies.run(write_parsed_answer, (), serialized(answer), call.deadline))[1]

    async def _metadata(self, request: ModelRequest, context: Context) -> pb.ModelMetadataResponse:
        message = pb.ModelMetadataRequest(name=request.model, version=request.version)
        return await self._inference.ModelMetadata(message, context)

    async def _metadata_of_called(self, request: ModelBody, call: CallContext) -> pb.ModelMetadataResponse:
        message = pb.ModelMetadataRequest(name=request.model, version=request.version)
        return await self._inference.metadata_of_called(message, call)

    # ------------------------------------------------------------------ administration

    async def RepositoryIndex(self, request: HttpBody, context: Context) -> HttpBody:
        answer = await self._inference.RepositoryIndex(documents.index_request(request.data), context)
        return json_body(documents.index_of(answer))

    async def RepositoryLoad(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.load_request(request.model, request.body.data)
        await self._inference.RepositoryModelLoad(message, context)
        return json_body({})

    async def RepositoryUnload(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.unload_request(request.model, request.body.data)
        await self._inference.RepositoryModelUnload(message, context)
        return json_body({})

    async def Predictors(self, request: Empty, context: Context) -> HttpBody:
        client = call_context(context, f"{_SERVICE}/Predictors").client
        return json_body({"predictors": [documents.predictor(link, client) for link in self._links.all]})

    async def ReadTraceSetting(self, request: ModelRequest, context: Context) -> HttpBody:
        answer = await self._inference.TraceSetting(pb.TraceSettingRequest(model_name=request.model), context)
        return json_body(documents.trace_settings(answer))

    async def WriteTraceSetting(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.trace_request(request.model, request.body.data)
        return json_body(documents.trace_settings(await self._inference.TraceSetting(message, context)))

    async def ReadLogSettings(self, request: Empty, context: Context) -> HttpBody:
        return json_body(documents.log_settings(await self._inference.LogSettings(pb.LogSettingsRequest(), context)))

    async def WriteLogSettings(self, request: HttpBody, context: Context) -> HttpBody:
        answer = await self._inference.LogSettings(documents.log_request(request.data), context)
        return json_body(documents.log_settings(answer))

    async def SharedMemory(self, request: SharedMemoryRequest, context: Context) -> NoReturn:
        if request.kind not in _SHARED_MEMORY:
            raise NotFoundError("unknown path")
        raise NotImplementedMethodError("shared memory is not supported; send tensors in the request")


def _size(answer: pb.ModelInferResponse | bytes) -> int:
    return len(answer) if isinstance(answer, bytes) else answer.ByteSize()


def _parsed(answer: pb.ModelInferResponse | bytes) -> pb.ModelInferResponse:
    return parsed_answer(answer) if isinstance(answer, bytes) else answer


def _set_readiness_status(ready: bool) -> None:
    """Sets status 503 if not ready; the answer keeps its body."""
    if not ready:
        head_of_call().add(*NotReadyError("not ready", hop="predictor").trailing_metadata(""))


def _header_length(call: CallContext) -> int | None:
    for key, value in call.metadata:
        if key == HEADER_LENGTH:
            if not isinstance(value, str) or not value.isascii() or not value.isdigit() or len(value) > 18:
                raise InvalidRequestError(f"{HEADER_LENGTH} must be a whole number")
            return int(value)
    return None
