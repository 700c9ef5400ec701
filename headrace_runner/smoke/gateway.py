"""A gateway as ordinary clients see it: a gRPC channel, one with the predictor's authority, and HTTP; its models.

A model's metadata and configuration determine what it must answer.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import grpc
import httpx2
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from headrace.errors import FAILED_HOP, StartupError
from headrace.rpc.client.caller_key import headers
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_runner.gateway import Gateway as GrpcGateway
from headrace_runner.gateway import open_channel

_MERGED_ANSWERS = 2  # On a busy machine a short answer may have been read when it was whole: that many are repeated.
_TIMEOUT_S = 60.0
_CODES = {200: "OK", 400: "INVALID_ARGUMENT", 404: "NOT_FOUND"}
_IN_STREAM = "an error in the stream"  # `error_message` of ModelStreamInfer, which has no status.
_REQUEST_ID = "x-request-id"
_OPENAI_PATHS = ("/v1/", "/openai/")
# A piece of text that is not empty: in JSON, in a message, and as a tensor's raw contents after its length.
_TEXT = re.compile(r'(?:text|content|text_output)"?: ?"[^"]|raw_output_contents: "(?!(?:\\000){4}")')

_NOT_FINITE = re.compile(r"[\[,:] ?-?(?:NaN|Infinity)")


class Failed(StartupError):  # noqa: N818  # It reports a finding, not an error of the program.
    """A check's expectation is not met."""


class Answer(NamedTuple):
    """A complete answer. Its pieces are messages, lines, or bytes if the request had bytes; `times` are their arrivals.

    `status` is HTTP's or the name of gRPC's; `error` the message of an error of its API, "" if it is none.
    """

    status: str
    error: str
    pieces: list[Any]
    times: list[float]
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        return "\n".join(
            piece.decode(errors="replace") if isinstance(piece, bytes) else str(piece) for piece in self.pieces
        )

    def expect(self, status: int, *contents: str) -> "Answer":
        """Returns the answer; raises Failed if its status is not `status` of HTTP or gRPC, or if contents are missing.

        Spaces are ignored.
        """
        expected, text = str(status) if self.status.isdigit() else _CODES[status], self.text
        if self.status != expected:
            raise Failed(f"{expected} was expected, not {self.status}: {self.error or text[:200]}")
        for content in contents:
            if "".join(content.split()) not in "".join(text.split()):
                raise Failed(f"no {content} in {text[-500:]}")
        return self


@dataclass(frozen=True)
class Check:
    """One row of the table: a call, the expected status and, for 200, the expected contents.

    `streamed`: it must arrive in pieces, unless it has no text. `may_refuse`: a user's own code may refuse the request.
    `finite`: numbers in JSON must be neither NaN nor infinite.
    """

    protocol: str
    name: str
    call: Callable[[], Answer]
    contents: tuple[str, ...] = ()
    status: int = 200
    streamed: bool = False
    may_refuse: bool = False
    finite: bool = False

    def run(self) -> str:
        """Returns the table's text; raises Failed, or errors of the network, if it does not pass."""
        answer = self.call()
        for _ in range(_MERGED_ANSWERS):
            if not self.streamed or len(answer.pieces) > 1:
                break
            answer = self.call()
        if self.may_refuse and answer.status in ("400", _CODES[400], _IN_STREAM):
            return f"the model's own refusal: {answer.error}"
        answer.expect(self.status, *(self.contents if self.status == 200 else ()))
        if self.status != 200:
            if FAILED_HOP not in answer.headers or not answer.error:
                raise Failed(f"no {FAILED_HOP}, or not its API's error: {answer.text}")
            return f"{answer.status}: {answer.error}"
        if answer.status.isdigit() and _REQUEST_ID not in answer.headers:
            raise Failed(f"no {_REQUEST_ID}")
        if self.finite and _NOT_FINITE.search(answer.text):
            raise Failed(f"not every number is finite: {answer.text[:500]}")
        if not self.streamed:
            return answer.text
        has_text = isinstance(answer.pieces[0], bytes) or _TEXT.search(answer.text)
        if (has_text and len(answer.pieces) < 2) or '"error":' in answer.text:
            raise Failed(f"several pieces of text were expected, not {answer.text}")
        first_ms, last_ms = answer.times[0] * 1000, answer.times[-1] * 1000
        return f"{len(answer.pieces)} pieces, the first after {first_ms:.0f} ms, the last after {last_ms:.0f} ms"


class Gateway(GrpcGateway):
    """See the module; to be closed."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._at_predictor = open_channel(address, ("grpc.default_authority", "predictor"))
        self.predictor = GRPCInferenceServiceStub(self._at_predictor)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(self.channel)
        self._http = httpx2.Client(base_url=f"http://{address}", headers=headers(), timeout=_TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self._http.close()
        self._at_predictor.close()
        super().close()

    def rest(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Sends a GET, or a POST of JSON or of bytes."""
        pieces: list[Any] = []
        times, started = [], time.monotonic()
        sent = {} if body is None else {"content" if isinstance(body, bytes) else "json": body}
        with self._http.stream("POST" if sent else "GET", path, headers=dict(headers or {}), **sent) as response:
            for piece in response.iter_raw() if "content" in sent else response.iter_lines():
                if piece:
                    pieces.append(piece)
                    times.append(time.monotonic() - started)
        answer = Answer(str(response.status_code), "", pieces, times, response.headers)
        return answer if response.status_code == 200 else answer._replace(error=_error_of(path, answer.text))


def ask(stub: Any, name: str, request: Any) -> Answer:
    """Makes a gRPC call of any kind with one request."""
    pieces, times, started, method = [], [], time.monotonic(), getattr(stub, name)
    is_stream = isinstance(method, grpc.StreamStreamMultiCallable)
    try:
        found = method(iter([request]) if is_stream else request, timeout=_TIMEOUT_S)
        for message in found if hasattr(found, "__next__") else [found]:
            pieces.append(message)
            times.append(time.monotonic() - started)
    except grpc.RpcError as refused:
        error: Any = refused
        metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
        return Answer(error.code().name, error.details() or "", pieces, times, metadata)
    errors = [message.error_message for message in pieces if getattr(message, "error_message", "")]
    return Answer(_IN_STREAM if errors else "OK", "; ".join(errors), pieces, times, {})


def _error_of(path: str, body: str) -> str:
    """The message of an error in the format of the path's API; "" if the body is something else."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]) if path.startswith(_OPENAI_PATHS) else "" + error
    except (KeyError, TypeError, ValueError):
        return ""


class Kind(StrEnum):
    TEXT = "text generation"
    EMBEDDING = "embeddings"
    CLASSIFICATION = "classification"
    TENSORS = "tensors"
    PROCESSOR = "a processor before a model"


@dataclass(frozen=True)
class Model:
    """A model from its metadata and configuration; `details` are those of its kind."""

    name: str
    kind: Kind
    details: str
    version: str
    inputs: Sequence[Any]  # Each has name, datatype and shape, in which -1 is any size.
    has_half_floats: bool
    decoupled: bool
    has_chat_template: bool
    takes_text: bool


def describe(gateway: Gateway, name: str) -> Model:
    """Queries the stack; raises Failed if there is no such model or no stack."""

    def about(stub: Any, method: str, request: Any) -> Any:
        answer = ask(stub, method, request)
        if answer.error:
            raise Failed(f"model {name!r}: {answer.status}: {answer.error}")
        return answer.pieces[0]

    metadata = about(gateway.inference, "ModelMetadata", pb.ModelMetadataRequest(name=name))
    config = about(gateway.inference, "ModelConfig", pb.ModelConfigRequest(name=name)).config
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    kinds = {"embedding": Kind.EMBEDDING, "classification": Kind.CLASSIFICATION}
    kind = Kind.PROCESSOR if metadata.platform == "headrace_processor" else Kind.TENSORS
    kind = kinds.get(parameters.get("kind", ""), kind)
    decoupled = config.model_transaction_policy.decoupled
    has_chat_template, takes_text = parameters.get("chat_template") == "true", False
    details = ", many answers to a request" if decoupled else ""
    if any(tensor.name == "text_input" for tensor in metadata.inputs):
        kind = Kind.TEXT
        inner = about(gateway.predictor, "ModelConfig", pb.ModelConfigRequest(name=name)).config
        build = "encoder-decoder" if inner.parameters["is_encoder_decoder"].string_value == "true" else "decoder"
        details = f", {build}, {'with' if has_chat_template else 'without'} chat template"
    elif kind in kinds.values():
        takes_text = f'"{name}"' in gateway.rest("/v1/models").expect(200).text
        details = " of texts and ids" if takes_text else " of ids"
    tensors = (*metadata.inputs, *metadata.outputs)
    return Model(
        name=name,
        kind=kind,
        details=details,
        version=metadata.versions[-1] if metadata.versions else "",
        inputs=metadata.inputs,
        has_half_floats=any(tensor.datatype in ("FP16", "BF16") for tensor in tensors),
        decoupled=decoupled,
        has_chat_template=has_chat_template,
        takes_text=takes_text,
    )
