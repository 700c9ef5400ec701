"""Receives the gateway's access log over OTLP: calls of models, and calls that the gateway refused or could not
forward.

Each line is stored as a record of the call. The store joins it to the service's record with the same `call_id`; if no
service recorded the call, queries return it as it is, with the same status names as other records. A line that comes
before its record costs the store several times as much as one that comes after it, so lines are held for a moment, in
which taps ship what has ended; a logger that is killed loses those lines. The body has the values of the access log in
envoy/envoy.yaml, with line breaks between them; Envoy writes "-" for a missing value. What a client sends need not be
UTF-8, and Envoy forwards it unchanged, so the messages here have OTLP's fields with bytes for strings. An unreadable
value is treated as missing; an unreadable line is dropped.

Internal: the gateway does not route this service, and reflection does not list it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2

from headrace.payload.records import as_uuid7, next_id
from headrace.rpc import Context
from headrace.rpc.http2.request import seconds_of
from headrace_logger.store.store import Store
from headrace_protos.headrace_pb2 import GatewayCall, PayloadRecord

logger = logging.getLogger(__name__)

_SERVICE = logs_service_pb2.DESCRIPTOR.services_by_name["LogsService"].full_name
_MAX_CHARACTERS = 1024
_MAX_ID = 256
_MAX_DIGITS = 19  # The maximum for a number of 64 bits.
_MAX_UINT32 = 2**32 - 1
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_HOLD_S = 0.6  # More than a tap gathers records for.
_TURN = 64  # Lines that are parsed before the event loop runs other tasks.

# In the order of the access log.
_VALUES = (
    *("call_id", "request_id", "client", "path", "routed_path", "content_type", "grpc_timeout", "http_status"),
    *("grpc_status", "failed_hop", "failed_hop_trailer", "flags", "details", "duration_ms", "request_bytes"),
    *("response_bytes", "cluster", "upstream", "peer"),
)
_MISSING = "-"
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_OF_HTTP = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# Envoy's response flags: the caller left; a timeout of the gateway expired; the connection to the service broke.
_LEFT = {"DC", "DR"}
_TOO_LATE = {"UT", "SI", "DT"}
_BROKE = {"UC", "UR", "UF", "UPE"}
# With these flags Envoy's upstream address is that of the last host tried, which it could not connect to.
_NOT_REACHED = {"UF", "UH"}
# The clusters whose services record requests, and their hops.
_RECORDERS = {"transformer": "transformer", "transformer_http": "transformer", "direct": "predictor"}
# The gateway notices an expired deadline of the caller up to this much early.
_DEADLINE_MARGIN_MS = 10

_Values = Mapping[str, str]


class GatewayCalls:
    """Stores the gateway's access log."""

    def __init__(self, store: Store, hold_s: float = _HOLD_S) -> None:
        self._store = store
        self._hold_s = hold_s

    def add_to(self, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=_ExportRequest.FromString,
            response_serializer=ExportLogsServiceResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),))

    async def _export(self, request: Any, context: Context) -> ExportLogsServiceResponse:
        await asyncio.sleep(self._hold_s)
        calls: list[LoggedCall] = []
        failures: list[Exception] = []
        logs = (log for resource in request.resource_logs for scope in resource.scope_logs for log in scope.log_records)
        for number, log in enumerate(logs, 1):
            try:
                calls.append(LoggedCall(log))
            except Exception as error:
                failures.append(error)
            if number % _TURN == 0:
                await asyncio.sleep(0)
        if failures:
            text = "%d lines of the gateway's access log cannot be read"
            logger.error(text, len(failures), exc_info=failures[0])
        await self._store.add_calls(calls)
        return ExportLogsServiceResponse()


class LoggedCall:
    """A call as the gateway logged it; most need no record of their own, for a service has recorded them.

    `log` is a log record whose strings are bytes; raises ValueError if it has more or fewer values.
    """

    def __init__(self, log: Any) -> None:
        body = log.body.string_value.decode(errors="replace").split("\n")
        values: _Values = {name: value for name, value in zip(_VALUES, body, strict=True) if value != _MISSING}
        response_flags = values.get("flags", "-")[:_MAX_ID]
        flags = set(response_flags.split(",")) - {"", "-"}
        # PostgreSQL has no NUL, which no gateway of ours sends.
        self.call_id = values.get("call_id", "")[:_MAX_ID].replace("\0", "")
        self.gateway = GatewayCall(
            path=values.get("path", "").partition("?")[0][:_MAX_CHARACTERS],
            http_status=min(_number(values, "http_status"), _MAX_UINT32),
            response_flags=response_flags,
            details=values.get("details", "")[:_MAX_CHARACTERS],
            duration_ms=_number(values, "duration_ms"),
            request_bytes=_number(values, "request_bytes"),
            response_bytes=_number(values, "response_bytes"),
            upstream="" if flags & _NOT_REACHED else values.get("upstream", "")[:_MAX_ID],
            peer=values.get("peer", "")[:_MAX_ID],
        )
        self._log = log
        self._values = values
        self._flags = flags

    def record(self) -> PayloadRecord:
        """The record of a call that no service has recorded; incomplete where one should have, with its contents."""
        log, values, gateway = self._log, self._values, self.gateway
        status = _status(values, self._flags, gateway)
        seconds, nanos = divmod(log.time_unix_nano, 1_000_000_000)
        record = PayloadRecord(
            record_id=str(as_uuid7(next_id(log.time_unix_nano // 1_000_000, 0))),
            time=Timestamp(seconds=seconds, nanos=nanos),
            request_id=values.get("request_id", "")[:_MAX_ID],
            protocol=_protocol(values, gateway.path),
            status=status,
            message="" if status == "OK" else f"{gateway.details} ({gateway.response_flags})",
            failed_hop=_failed_hop(values, status, gateway),
            duration_ms=gateway.duration_ms,
            trace_id=log.trace_id.hex() if len(log.trace_id) == _TRACE_ID_BYTES else "",
            span_id=log.span_id.hex() if len(log.span_id) == _SPAN_ID_BYTES else "",
            client=values.get("client", "")[:_MAX_ID],
            call_id=self.call_id,
            gateway=gateway,
        )
        record.incomplete = self.may_be_recorded(record)
        return record

    def may_be_recorded(self, record: PayloadRecord) -> bool:
        """Whether the call of this record has reached a service that records."""
        reached = self._values.get("cluster") in _RECORDERS and bool(self.gateway.upstream)
        return reached and record.failed_hop != "gateway"


def _status(values: _Values, flags: set[str], gateway: GatewayCall) -> str:
    """The gRPC status name, for any protocol of the caller."""
    if flags & _LEFT:
        # In Envoy's flags an expired deadline of the caller looks like a cancellation.
        timeout_s = seconds_of(values.get("grpc_timeout", ""))
        late = timeout_s is not None and gateway.duration_ms + _DEADLINE_MARGIN_MS >= 1000 * timeout_s
        return "DEADLINE_EXCEEDED" if late else "CANCELLED"
    if _is_grpc(values) and not flags & _BROKE:
        return _NAMES.get(_number(values, "grpc_status", 2), "UNKNOWN")
    if 200 <= gateway.http_status < 400 and not flags & (_BROKE | _TOO_LATE):
        return "OK"
    if flags & _TOO_LATE:
        return "DEADLINE_EXCEEDED"
    return "UNAVAILABLE" if flags & _BROKE else _OF_HTTP.get(gateway.http_status, "INTERNAL")


def _failed_hop(values: _Values, status: str, gateway: GatewayCall) -> str:
    """The hop that the caller's answer names; without one, the gateway if no service answered."""
    if status in ("OK", "CANCELLED"):
        return ""
    hop = (values.get("failed_hop") or values.get("failed_hop_trailer") or "")[:_MAX_ID]
    cluster = values.get("cluster", "")
    return hop or (_RECORDERS.get(cluster, cluster) if gateway.upstream else "gateway")


def _protocol(values: _Values, path: str) -> str:
    """The called method, "package.Service/Method", also for REST if the gateway transcoded it; otherwise the path."""
    routed = values.get("routed_path", "").partition("?")[0][:_MAX_CHARACTERS]
    return routed.removeprefix("/") if _is_grpc(values) or routed != path else path


def _is_grpc(values: _Values) -> bool:
    is_transcoded = values.get("path") != values.get("routed_path")
    return values.get("content_type", "").startswith("application/grpc") and not is_transcoded


def _number(values: _Values, name: str, default: int = 0) -> int:
    text = values.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else default


def _with_bytes_for_strings() -> Any:
    """OTLP's ExportLogsServiceRequest with bytes instead of strings, which have the same encoding on the wire."""
    pool = DescriptorPool()
    for module in (common_pb2, resource_pb2, logs_pb2, logs_service_pb2):
        file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for message in file.message_type:
            for field in message.field:
                if field.type == FieldDescriptorProto.TYPE_STRING:
                    field.type = FieldDescriptorProto.TYPE_BYTES
        pool.AddSerializedFile(file.SerializeToString())
    name = logs_service_pb2.ExportLogsServiceRequest.DESCRIPTOR.full_name
    return GetMessageClass(pool.FindMessageTypeByName(name))


_ExportRequest = _with_bytes_for_strings()
