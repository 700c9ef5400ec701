"""A server of the Open Inference Protocol by V2 REST, in the place of `predictors/client.py`.

`infer` has one answer, so a stream has one response and no text is generated. There is no index, no ModelConfig and no
loading. Tensors go as binary data where the server's metadata list that extension, else as JSON; this is requested
again after the server was unavailable. Large JSON is written and read by processes of their own, see body_processes.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn
from urllib.parse import quote

import orjson
from google.protobuf import json_format

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotFoundError,
    NotImplementedMethodError,
    NotReadyError,
    OverloadedError,
)
from headrace.oip.body_tensors import HEADER_LENGTH
from headrace.oip.stream_infer import FINAL
from headrace.oip.wire_fields import field_head
from headrace.rpc.client_interceptors import CallSpan
from headrace_protos import inference_pb2 as pb
from services.transformer.predictors.answers import BrokenAnswerError
from services.transformer.predictors.oip_call import OipCall
from services.transformer.predictors.predictor import PROBE_TIMEOUT_S, Predictor
from services.transformer.predictors.tokens import Generation
from services.transformer.predictors.v2_rest.bodies import (
    Contents,
    binary_body,
    read_answer,
    split_request,
    write_binary_body,
    write_json_body,
)
from services.transformer.predictors.v2_rest.transport import Answer, HttpTransport
from services.transformer.processes.body_processes import SMALL_BYTES, BodyProcesses

_BINARY_EXTENSION = "binary_tensor_data"
_BINARY, _JSON = "application/octet-stream", "application/json"
_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_DOTS = (".", "..")
_UNSUPPORTED = "TRANSFORMER_PROTOCOL=v2 calls the predictor by REST, which has no such method"


def _final_mark() -> bytes:
    response = pb.ModelInferResponse()
    response.parameters[FINAL].bool_param = True
    return response.SerializeToString()


_FINAL_MARK = _final_mark()  # Behind a serialized response it is one more parameter of it.


class V2RestClient(Predictor):
    """See the module. `address` is host:port."""

    streams = False

    def __init__(self, address: str, bodies: BodyProcesses, wait_s: float = 120.0, start_wait_s: float = 30.0) -> None:
        super().__init__(wait_s, start_wait_s)
        self._http = HttpTransport(address, start_wait_s)
        self._bodies = bodies
        self._inference = V2RestStub(self._http)
        self._is_binary: bool | None = None  # None: not known, or not any more.

    @property
    def inference(self) -> V2RestStub:
        return self._inference

    async def close(self) -> None:
        await self._http.close()

    async def ready(self) -> bool:
        return await self._reports_ready("/v2/health/ready", "/v2/health/ready")

    async def model_ready(self, name: str, version: str = "") -> bool:
        try:
            template, path = _model_path(name, version, "/ready")
        except NotFoundError:
            return False
        return await self._reports_ready(template, path)

    async def infer_bytes(self, request: bytes, deadline: Deadline) -> bytes:
        head, raw = split_request(request)
        called = pb.ModelInferRequest.FromString(head)
        try:
            header_length, body = await self._body(request, head, raw, deadline)
            headers = {"content-type": _JSON if header_length is None else _BINARY}
            if header_length is not None:
                headers[HEADER_LENGTH] = str(header_length)
            path = _model_path(called.model_name, called.model_version, "/infer")
            answer = await self._http.post(*path, headers, body, deadline)
        except NotReadyError:
            self._is_binary = None
            raise
        return await self._read(answer, deadline)

    async def stream_bytes(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The one answer, marked as the last response."""
        answer = await self.infer_bytes(request, deadline)
        yield field_head(_INFER_RESPONSE, len(answer) + len(_FINAL_MARK)) + answer + _FINAL_MARK

    def generate(self, generation: Generation, deadline: Deadline, span: CallSpan) -> OipCall:
        raise NotImplementedMethodError(_UNSUPPORTED)

    async def _body(
        self, request: bytes, head: bytes, raw: list[memoryview], deadline: Deadline
    ) -> tuple[int | None, list[Contents]]:
        """The size of the JSON where binary data follows, and the body in parts."""
        header_length: int | None
        if await self._takes_binary(deadline):
            if len(head) <= SMALL_BYTES:
                return binary_body(head, raw)
            if raw:
                raise InvalidRequestError(f"the request has {len(head)} bytes beside its tensors")
            header_length, body = await self._bodies.run(write_binary_body, (), head, deadline)
        elif len(request) <= SMALL_BYTES:
            header_length, body = write_json_body(request)
        else:
            header_length, body = await self._bodies.run(write_json_body, (), request, deadline)
        return header_length, [body]

    async def _read(self, answer: Answer, deadline: Deadline) -> bytes:
        """The answer as a serialized ModelInferResponse."""
        length = answer.headers.get(HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit() and len(length) <= 18):
            raise BrokenAnswerError(f"the predictor's answer: {HEADER_LENGTH} is not a number", hop="predictor")
        header_length = None if length is None else int(length)
        if (len(answer.body) if header_length is None else header_length) <= SMALL_BYTES:
            return read_answer(answer.body, header_length)[1]
        return (await self._bodies.run(read_answer, (header_length,), answer.body, deadline))[1]

    async def _takes_binary(self, deadline: Deadline) -> bool:
        """Whether the server takes binary tensors; raises NotReadyError where it is away."""
        if self._is_binary is None:
            try:
                answer = await self._http.get("/v2", "/v2", _probe_deadline(deadline))
                extensions = _object(answer).get("extensions")
                self._is_binary = isinstance(extensions, list) and _BINARY_EXTENSION in extensions
            except DeadlineError:
                deadline.left()  # Where it was the request's own.
                raise NotReadyError("the predictor does not answer", hop="predictor") from None
            except BrokenAnswerError:
                self._is_binary = False
            except (HopBrokenError, NotReadyError, OverloadedError):
                raise
            except HeadraceError:
                self._is_binary = False  # Not every server has metadata.
        return self._is_binary

    async def _reports_ready(self, template: str, path: str) -> bool:
        """By the status, and by the field `ready` if the body has one."""
        try:
            answer = await self._http.get(template, path, Deadline.after(PROBE_TIMEOUT_S))
            return not answer.body or _object(answer).get("ready") is not False
        except BrokenAnswerError:
            return True
        except HeadraceError:
            return False


class V2RestStub:
    """Calls about models, as the gRPC stub has them; raises HeadraceError."""

    def __init__(self, http: HttpTransport) -> None:
        self._http = http

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, /, *, timeout: float | None = None
    ) -> pb.ModelMetadataResponse:
        template, path = _model_path(request.name, request.version)
        answer = await self._http.get(template, path, Deadline.after(timeout))
        try:
            return json_format.ParseDict(_object(answer), pb.ModelMetadataResponse(), ignore_unknown_fields=True)
        except json_format.ParseError:
            raise HopBrokenError("the predictor's metadata are not the protocol's", hop="predictor") from None

    async def ModelConfig(self, request: Any, /, *, timeout: float | None = None) -> NoReturn:  # noqa: N802
        raise NotImplementedMethodError(_UNSUPPORTED)

    ModelStatistics = RepositoryIndex = RepositoryModelLoad = RepositoryModelUnload = ModelConfig


def _model_path(name: str, version: str, method: str = "") -> tuple[str, str]:
    """The path's template and the path of a model."""
    if name in _DOTS or version in _DOTS:  # Which a URL cannot name.
        raise NotFoundError(f"no model {name!r} of version {version!r}" if version else f"no model {name!r}")
    template, path = "/v2/models/{model}", f"/v2/models/{quote(name, safe='')}"
    if version:
        template, path = f"{template}/versions/{{version}}", f"{path}/versions/{quote(version, safe='')}"
    return template + method, path + method


def _probe_deadline(deadline: Deadline) -> Deadline:
    return Deadline(min(deadline.at, Deadline.after(PROBE_TIMEOUT_S).at))


def _object(answer: Answer) -> dict[str, Any]:
    try:
        values = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise BrokenAnswerError("the predictor's answer is not a JSON object", hop="predictor")
    return values
