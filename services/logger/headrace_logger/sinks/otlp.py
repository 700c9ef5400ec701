"""Sends the spans of gen_ai.py by OTLP (opentelemetry.io/docs/specs/otlp), over gRPC or HTTP, one record a request.

The scheme of the URL chooses: `grpc://host:4317`, `grpcs://host:4317` with TLS, or the whole URL of an HTTP receiver,
`https://host/v1/traces`. Statuses that another attempt may change are tried again, wrong credentials and a wrong path
too: nothing is skipped while someone corrects the settings. A receiver that rejects a span, or its size, gets the next
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

import grpc
import httpx2
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from headrace.rpc.client.channel import channel_options
from headrace_logger.sinks.delivery import Event, HttpSink, RefusedError, TryAgainError, without_credentials
from headrace_logger.sinks.gen_ai import export_request, is_generation
from headrace_protos.headrace_pb2 import PayloadRecord

_EXPORT = f"/{trace_service_pb2.DESCRIPTOR.services_by_name['TraceService'].full_name}/Export"
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)


class _Spans:
    """Converts records to events, each with one span."""

    headers: Mapping[str, str] = {}

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """One request for a generation, none for other records; called on any thread."""
        if not is_generation(record):
            return ()
        return (Event(record.record_id, self.headers, export_request(record).SerializeToString()),)


class GrpcSink(_Spans):
    """Calls a receiver; an attempt takes at most `timeout_s` seconds."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.name = _name_of(url)
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._timeout_s = timeout_s
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
    """Posts to a receiver."""

    tried_again = (401, 403, 404, 408, 429)

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, connections: int) -> None:
        super().__init__(_name_of(url), url, timeout_s, connections)
        # The answer is read as it comes.
        self.headers = {**headers, "content-type": "application/x-protobuf", "accept-encoding": "identity"}

    def _check(self, response: httpx2.Response, answer: bytes) -> None:
        if response.headers.get("content-type") == "application/x-protobuf":
            _check(answer)


def otlp_sink(url: str, headers: str, timeout_s: float, connections: int) -> GrpcSink | OtlpHttpSink:
    """The sink of a URL; `headers` as in OTEL_EXPORTER_OTLP_HEADERS: `name=value,…`, encoded as in a URL."""
    pairs = (part.partition("=") for part in headers.split(",") if part.strip())
    parsed = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    if urlsplit(url).scheme in ("grpc", "grpcs"):
        return GrpcSink(url, parsed, timeout_s)
    return OtlpHttpSink(url, parsed, timeout_s, connections)


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
