"""CloudEvents 1.0 over HTTP, binary mode, in the format of KServe's logger.

A record becomes one event for the request and one for its answer, with KServe's types and extensions (kserve/kserve,
pkg/logger/worker.go). Both have the record's id, by which KServe's consumers pair them; their sources differ,
`<source>/request` and `<source>/response`, because CloudEvents requires a unique (source, id). An event without
contents is omitted: the settings may exclude requests or answers from the log. `SinkRunner` sends a record again if its
delivery is uncertain, so its events are the same every time, including their ids.

The data is JSON: the fields of PayloadRecord by name. Headers follow the HTTP binding 1.0.2, section 3.1.3.2, exactly.
The CloudEvents SDK does not: it also escapes `/` and `:`, and receivers with its first generation, including KServe's,
unescape nothing.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import orjson

from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks.delivery import Event, HttpSink, without_credentials
from headrace_logger.values import row, to_json
from headrace_protos.headrace_pb2 import PayloadRecord

REQUEST_TYPE = "org.kubeflow.serving.inference.request"
RESPONSE_TYPE = "org.kubeflow.serving.inference.response"

_BOTH = ("record_id", "request_id", "time", "model", "protocol", "client", "call_id", "metadata")
_REQUEST_CONTENT = ("prompt", "parameters", "inputs")
_RESPONSE_CONTENT = ("text", "chunks", "outputs")
_RESPONSE = (
    *_RESPONSE_CONTENT,
    *("finish_reason", "status", "message", "failed_hop"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
    *("ttft_ms", "duration_ms", "engine_ms", "resumes", "predictors", "incomplete"),
)
# The maximum length of a caller's value in a header: a sink might refuse an event with a longer one.
_MAX_HEADER_CHARACTERS = 256
_UNESCAPED = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class CloudEventsSink(HttpSink):
    """Posts a record's events to a URL; its name is the URL without its secrets."""

    def __init__(self, url: str, settings: LoggerSettings) -> None:
        super().__init__(without_credentials(url), url, settings)
        self._source = settings.sink_source.rstrip("/")
        self._namespace = settings.sink_namespace

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """Returns the record's events in the order of sending; called on any thread."""
        values = row(record)
        values["parameters"] = _parsed(record.parameters)
        has_request = any(values[name] for name in _REQUEST_CONTENT)
        # An error is an answer too.
        has_response = record.status != "OK" or any(values[name] for name in _RESPONSE_CONTENT)
        events = []
        if has_request:
            data = {name: values[name] for name in (*_BOTH, *_REQUEST_CONTENT)}
            events.append(self._event(record, REQUEST_TYPE, "request", values["time"], data))
        if has_response or not has_request:
            data = {name: values[name] for name in (*_BOTH, *_RESPONSE)}
            end = values["time"]
            with suppress(OverflowError, ValueError):
                end = end and end + timedelta(milliseconds=record.duration_ms)
            events.append(self._event(record, RESPONSE_TYPE, "response", end, data))
        return events

    def _event(self, record: PayloadRecord, kind: str, part: str, time: datetime | None, data: dict[str, Any]) -> Event:
        attributes = {
            "specversion": "1.0",
            "id": record.record_id,
            "source": f"{self._source}/{part}",
            "type": kind,
            "time": time.isoformat().replace("+00:00", "Z") if time else "",
            # A truncated id could equal another one.
            "subject": record.request_id if len(record.request_id) <= _MAX_HEADER_CHARACTERS else "",
            "inferenceservicename": record.model[:_MAX_HEADER_CHARACTERS],
            "namespace": self._namespace,
            "component": "transformer",
            "endpoint": "default",
            "traceparent": _traceparent(record),
        }
        # CloudEvents has no empty attributes: one without a value is omitted.
        headers = {f"ce-{name}": quote(value, safe=_UNESCAPED) for name, value in attributes.items() if value}
        return Event(record.record_id, headers | {"content-type": "application/json"}, to_json(data))


def _parsed(parameters: str) -> Any:
    """Returns the sampling parameters unchanged: as JSON, which is not encoded again however deep it is, or as text."""
    if not parameters:
        return None
    try:
        orjson.loads(parameters)
    except orjson.JSONDecodeError:
        return parameters
    return orjson.Fragment(parameters)


def _traceparent(record: PayloadRecord) -> str:
    """W3C's trace context, https://www.w3.org/TR/trace-context; empty if the record has no span."""
    known = re.fullmatch("[0-9a-f]{32}", record.trace_id) and re.fullmatch("[0-9a-f]{16}", record.span_id)
    return f"00-{record.trace_id}-{record.span_id}-01" if known else ""
