"""Generations as spans of OpenTelemetry's conventions for generative AI, sent by OTLP, one record a request.

The names, and the JSON of messages, are those of github.com/open-telemetry/semantic-conventions-genai: one span
`chat MODEL` or `text_completion MODEL` with `gen_ai.*` attributes, the messages in `gen_ai.input.messages` and
`gen_ai.output.messages`. It is a child of the span that answered the request, in the same trace. Its id derives from
that of the record: a span that is sent again is the same span.

The scheme of the URL chooses OTLP over gRPC or HTTP (opentelemetry.io/docs/specs/otlp): `grpc://host:4317`,
`grpcs://host:4317` with TLS, or the whole URL of an HTTP receiver, `https://host/v1/traces`. Statuses that another
attempt may change are tried again, wrong credentials and a wrong path too: nothing is skipped while someone corrects
the settings. A receiver that rejects a span, or its size, gets the next one.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import grpc
import httpx2
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from headrace.payload.records import answer_of
from headrace.rpc.client.channel import channel_options
from headrace_logger.export.shapes import output_tokens
from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks.delivery import Event, HttpSink, RefusedError, TryAgainError, without_credentials
from headrace_protos.headrace_pb2 import PayloadRecord

Value: TypeAlias = str | int | float | Sequence[str]

_PROVIDER = "headrace"
_RESOURCE = Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value=_PROVIDER))])
_SCOPE = InstrumentationScope(name="headrace.payload_log")
_LATEST_NS = 2**64 - 1
# Sampling parameter → attribute, and its type.
_SAMPLING: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "seed": ("gen_ai.request.seed", int),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
}

_EXPORT = f"/{trace_service_pb2.DESCRIPTOR.services_by_name['TraceService'].full_name}/Export"
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)


def is_generation(record: PayloadRecord) -> bool:
    """Whether the request had a prompt, or an engine has generated for it."""
    return bool(record.prompt or record.sampling) or record.HasField("engine_ms")


def export_request(record: PayloadRecord) -> ExportTraceServiceRequest:
    """The OTLP request that has the record's span."""
    scope = ScopeSpans(scope=_SCOPE, spans=[span_of(record)])
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=_RESOURCE, scope_spans=[scope])])


def span_of(record: PayloadRecord) -> Span:
    attributes = _attributes(record)
    is_traced = re.fullmatch("[0-9a-f]{32}", record.trace_id) and re.fullmatch("[0-9a-f]{16}", record.span_id)
    begin_ns = max(0, record.time.ToNanoseconds())
    span = Span(
        trace_id=bytes.fromhex(record.trace_id) if is_traced else uuid.UUID(record.record_id).bytes,
        span_id=hashlib.sha256(record.record_id.encode()).digest()[:8],
        parent_span_id=bytes.fromhex(record.span_id) if is_traced else b"",
        name=f"{attributes['gen_ai.operation.name']} {record.model}",
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=begin_ns,
        end_time_unix_nano=min(begin_ns + int(max(0.0, min(record.duration_ms, 1e12)) * 1_000_000), _LATEST_NS),
        attributes=[KeyValue(key=name, value=_value(value)) for name, value in attributes.items()],
    )
    if record.status not in ("OK", "CANCELLED"):
        span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=record.message))
    return span


def _attributes(record: PayloadRecord) -> dict[str, Value]:
    is_chat = record.prompt_kind == "messages"
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.served_model or record.model,
        "gen_ai.response.id": record.request_id or record.record_id,
        "gen_ai.usage.output_tokens": output_tokens(record),
        "headrace.record_id": record.record_id,
        "headrace.protocol": record.protocol,
    }
    if record.HasField("usage"):
        attributes["gen_ai.usage.input_tokens"] = record.usage.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.usage.cached_tokens
    if record.HasField("ttft_ms"):
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_ms / 1000
    if record.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = [record.finish_reason]
    if record.status != "OK":
        attributes["error.type"] = record.status
    if record.client:
        attributes["user.id"] = record.client
    return attributes | _sampling(record) | _messages(record)


def _sampling(record: PayloadRecord) -> dict[str, Value]:
    sampling = _parsed(record.sampling)
    if not isinstance(sampling, dict):
        return {}
    attributes: dict[str, Value] = {
        attribute: kind(sampling[name])
        for name, (attribute, kind) in _SAMPLING.items()
        if isinstance(sampling.get(name), int | float)
    }
    if stops := sampling.get("stop"):
        attributes["gen_ai.request.stop_sequences"] = [stops] if isinstance(stops, str) else [str(one) for one in stops]
    return attributes


def _messages(record: PayloadRecord) -> dict[str, Value]:
    """Prompt and answer, as far as they are on record."""
    attributes: dict[str, Value] = {}
    if record.prompt:
        chat = _parsed(record.prompt) if record.prompt_kind == "messages" else None
        given = chat if isinstance(chat, list) else [{"role": "user", "content": record.prompt}]
        attributes["gen_ai.input.messages"] = json.dumps(
            [_message(one["role"], one["content"]) for one in given if isinstance(one, dict) and "content" in one],
            ensure_ascii=False,
        )
    if answer := answer_of(record):
        message = _message("assistant", answer) | {"finish_reason": record.finish_reason or "error"}
        attributes["gen_ai.output.messages"] = json.dumps([message], ensure_ascii=False)
    return attributes


def _message(role: str, content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _parsed(text: str) -> Any:
    """The JSON, or None: a rule of redaction may have cut it."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _value(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=max(-(2**63), min(value, 2**63 - 1)))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))


class _Spans:
    """Converts records to events, each with one span."""

    headers: Mapping[str, str] = {}

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """One request for a generation, none for other records; called on any thread."""
        if not is_generation(record):
            return ()
        return (Event(record.record_id, self.headers, export_request(record).SerializeToString()),)


class GrpcSink(_Spans):
    def __init__(self, url: str, headers: Mapping[str, str], settings: LoggerSettings) -> None:
        self.name = _name_of(url)
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._timeout_s = settings.sink_timeout_s
        scheme, target = urlsplit(url).scheme, urlsplit(url).netloc
        if scheme == "grpcs":
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, options=channel_options())
        else:
            self._channel = grpc.aio.insecure_channel(target, options=channel_options())
        self._export: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_EXPORT)

    async def send(self, event: Event) -> None:
        try:
            answer = await self._export(event.body, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            if error.code() in _REFUSALS or "larger than max" in (error.details() or ""):
                raise RefusedError(text) from None
            raise TryAgainError(text) from None
        _check(answer)

    async def close(self) -> None:
        await self._channel.close()


class OtlpHttpSink(_Spans, HttpSink):
    tried_again = (401, 403, 404, 408, 429)

    def __init__(self, url: str, headers: Mapping[str, str], settings: LoggerSettings) -> None:
        super().__init__(_name_of(url), url, settings)
        # The answer is read as it comes.
        self.headers = {**headers, "content-type": "application/x-protobuf", "accept-encoding": "identity"}

    def _check(self, response: httpx2.Response, answer: bytes) -> None:
        if response.headers.get("content-type") == "application/x-protobuf":
            _check(answer)


def otlp_sink(settings: LoggerSettings) -> GrpcSink | OtlpHttpSink:
    """The sink of LOGGER_GEN_AI_URL; the headers are encoded as in a URL."""
    pairs = (part.partition("=") for part in settings.gen_ai_headers.get_secret_value().split(",") if part.strip())
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    kind = GrpcSink if urlsplit(settings.gen_ai_url).scheme in ("grpc", "grpcs") else OtlpHttpSink
    return kind(settings.gen_ai_url, headers, settings)


def _check(answer: bytes) -> None:
    """Raises RefusedError if the receiver rejected the span."""
    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return
    if partial.rejected_spans:
        raise RefusedError(partial.error_message or "the span was rejected")


def _name_of(url: str) -> str:
    """Identifies the cursor: the URL without its secrets."""
    return f"gen_ai {without_credentials(url)}"
