"""The V2 protocol's REST with Triton's extensions: bodies to the messages of the gRPC servicer, and back.

Only bodies are read and written here: each method calls its gRPC counterpart in the `InferenceServicer`. The gateway
makes a REST error of the status and message of its exceptions, see frontends/http.py.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
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
from headrace_transformer.frontends.v2_rest.generate_body import read_generate, write_answer
from headrace_transformer.frontends.v2_rest.infer_body import (
    CONTENT_ENCODING,
    DEFLATE,
    OutputForm,
    inflated,
    is_small,
    read_body,
    read_raw_body,
    write_body,
)
from headrace_transformer.frontends.v2_rest.tensors import HEADER_LENGTH
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


@dataclass(frozen=True, eq=False)
class OpenInferenceServicer(rest_pb2_grpc.OpenInferenceServicer):
    """After `keep_alive_s` of silence a stream of events gets a comment; 0: never. `links` are the predictors."""

    inference: InferenceServicer
    pipeline: Pipeline
    bodies: BodyProcesses
    links: Links
    keep_alive_s: float = 15.0

    # ------------------------------------------------------------------ the server and its models

    async def ServerMetadata(self, request: Empty, context: Context) -> HttpBody:
        answer = await self.inference.ServerMetadata(pb.ServerMetadataRequest(), context)
        return json_body(documents.plain(answer))

    async def Live(self, request: Empty, context: Context) -> HttpBody:
        answer = await self.inference.ServerLive(pb.ServerLiveRequest(), context)
        return json_body({"live": answer.live})

    async def Ready(self, request: Empty, context: Context) -> HttpBody:
        """200 where a generation would work now, else 503: for load balancers."""
        answer = await self.inference.ServerReady(pb.ServerReadyRequest(), context)
        _set_readiness_status(answer.ready)
        return json_body({"ready": answer.ready})

    async def ModelReady(self, request: ModelRequest, context: Context) -> HttpBody:
        """As `Ready`, and 404 where there is no such model or version."""
        message = pb.ModelReadyRequest(name=request.model, version=request.version)
        answer = await self.inference.ModelReady(message, context)
        if not answer.ready:
            await self._metadata(request, context)  # Raises NotFoundError if there is none.
        _set_readiness_status(answer.ready)
        return json_body({"name": request.model, "ready": answer.ready})

    async def ModelMetadata(self, request: ModelRequest, context: Context) -> HttpBody:
        return json_body(documents.plain(await self._metadata(request, context)))

    async def ModelConfig(self, request: ModelRequest, context: Context) -> HttpBody:
        message = pb.ModelConfigRequest(name=request.model, version=request.version)
        return json_body(documents.plain((await self.inference.ModelConfig(message, context)).config))

    async def ModelStatistics(self, request: ModelRequest, context: Context) -> HttpBody:
        message = pb.ModelStatisticsRequest(name=request.model, version=request.version)
        return json_body(documents.plain(await self.inference.ModelStatistics(message, context), unset=True))

    # ------------------------------------------------------------------ inference

    async def Infer(self, request: ModelBody, context: Context) -> HttpBody:
        call = call_context(context, f"{_SERVICE}/Infer")
        form, data = await self._read(self._read_infer, request, call)
        message = InferRequest(data)
        answer = await self.inference.infer(message, call.with_id(message.id))
        header_length, body = await self._write(write_body, answer, call, form, here=not form.wants_json)
        if header_length is None:
            return HttpBody(content_type=JSON, data=body)
        head_of_call().add((HEADER_LENGTH, str(header_length)))
        return HttpBody(content_type=_BINARY, data=body)

    async def Generate(self, request: ModelBody, context: Context) -> HttpBody:
        call = call_context(context, f"{_SERVICE}/Generate")
        message = await self._read(self._read_generate, request, call)
        answer = await self.inference.infer(message, call.with_id(message.id))
        _, body = await self._write(write_answer, answer, call)
        return HttpBody(content_type=JSON, data=body)

    @rest_method(v2_error)
    async def GenerateStream(self, request: ModelBody, call: CallContext) -> Bodies:
        yield Events(self.keep_alive_s)
        message = await self._read(self._read_generate, request, call)
        async with aclosing(self.inference.answers(message, call.with_id(message.id))) as responses:
            async for response in responses:
                if response.outputs:  # A response without outputs only marks the end.
                    _, data = await self._write(write_answer, response, call)
                    yield HttpBody(content_type=EVENTS, data=b"data: " + one_line(data) + b"\n\n")

    async def _read(
        self, read: Callable[[ModelBody, CallContext], Awaitable[T]], request: ModelBody, call: CallContext
    ) -> T:
        """Reads a body; a refused one is recorded like any other request."""
        with self.pipeline.recording_refusals(call, request.model):
            return await read(request, call)

    async def _read_infer(self, request: ModelBody, call: CallContext) -> tuple[OutputForm, bytes]:
        data, length = await self._body(request, call), _header_length(call)
        if length == 0:
            metadata = await self._metadata_of_called(request, call)
            return read_raw_body(data, request.model, request.version, metadata)
        is_small = min(len(data), len(data) if length is None else length) <= SMALL_BYTES
        arguments = request.model, request.version, length
        return await self.bodies.run_unless(is_small, read_body, arguments, data, call.deadline)

    async def _read_generate(self, request: ModelBody, call: CallContext) -> InferRequest:
        metadata = await self._metadata_of_called(request, call)
        data = await self._body(request, call)
        arguments = request.model, request.version, metadata.SerializeToString()
        is_small = len(data) <= SMALL_BYTES
        _, message = await self.bodies.run_unless(is_small, read_generate, arguments, data, call.deadline)
        return InferRequest(message)

    async def _body(self, request: ModelBody, call: CallContext) -> bytes:
        data: bytes = request.body.data
        if (CONTENT_ENCODING, DEFLATE) in call.metadata:
            _, data = await self.bodies.run_unless(is_small(data, SMALL_BYTES), inflated, (), data, call.deadline)
        return data

    async def _write(
        self,
        write: Callable[..., tuple[T, bytes]],
        answer: pb.ModelInferResponse | bytes,
        call: CallContext,
        *arguments: Any,
        here: bool = False,
    ) -> tuple[T, bytes]:
        """What `write` makes of an answer, in a process of bodies unless it is small, or to be made `here`."""
        size = len(answer) if isinstance(answer, bytes) else answer.ByteSize()
        if here or size <= SMALL_BYTES:
            return write(answer, *arguments)
        return await self.bodies.run(write, arguments, serialized(answer), call.deadline)

    async def _metadata(self, request: ModelRequest, context: Context) -> pb.ModelMetadataResponse:
        message = pb.ModelMetadataRequest(name=request.model, version=request.version)
        return await self.inference.ModelMetadata(message, context)

    async def _metadata_of_called(self, request: ModelBody, call: CallContext) -> pb.ModelMetadataResponse:
        message = pb.ModelMetadataRequest(name=request.model, version=request.version)
        return await self.inference.metadata_of_called(message, call)

    # ------------------------------------------------------------------ administration

    async def RepositoryIndex(self, request: HttpBody, context: Context) -> HttpBody:
        answer = await self.inference.RepositoryIndex(documents.index_request(request.data), context)
        return json_body(documents.index_of(answer))

    async def RepositoryLoad(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.repository_request(pb.RepositoryModelLoadRequest, request.model, request.body.data)
        await self.inference.RepositoryModelLoad(message, context)
        return json_body({})

    async def RepositoryUnload(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.repository_request(pb.RepositoryModelUnloadRequest, request.model, request.body.data)
        await self.inference.RepositoryModelUnload(message, context)
        return json_body({})

    async def Predictors(self, request: Empty, context: Context) -> HttpBody:
        client = call_context(context, f"{_SERVICE}/Predictors").client
        return json_body({"predictors": [documents.predictor(link, client) for link in self.links.all]})

    async def ReadTraceSetting(self, request: ModelRequest, context: Context) -> HttpBody:
        answer = await self.inference.TraceSetting(pb.TraceSettingRequest(model_name=request.model), context)
        return json_body(documents.trace_settings(answer))

    async def WriteTraceSetting(self, request: ModelBody, context: Context) -> HttpBody:
        message = documents.trace_request(request.model, request.body.data)
        return json_body(documents.trace_settings(await self.inference.TraceSetting(message, context)))

    async def ReadLogSettings(self, request: Empty, context: Context) -> HttpBody:
        return json_body(documents.log_settings(await self.inference.LogSettings(pb.LogSettingsRequest(), context)))

    async def WriteLogSettings(self, request: HttpBody, context: Context) -> HttpBody:
        answer = await self.inference.LogSettings(documents.log_request(request.data), context)
        return json_body(documents.log_settings(answer))

    async def SharedMemory(self, request: SharedMemoryRequest, context: Context) -> NoReturn:
        if request.kind not in _SHARED_MEMORY:
            raise NotFoundError("unknown path")
        raise NotImplementedMethodError("shared memory is not supported; send tensors in the request")


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
