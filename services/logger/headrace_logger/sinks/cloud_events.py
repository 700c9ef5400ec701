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

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import orjson

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
_MAX_RETRY_AFTER_S = 3600.0
# The body of a response is ignored, but a connection can be reused only after it has been read to its end.
_MAX_ANSWER_BYTES = 64 * 1024


class TryAgainError(Exception):
    """The sink cannot accept the event now; `retry_after_s` is the minimum delay that it asks for."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The sink will never accept this event."""


@dataclass(frozen=True)
class Event:
    """The unit of delivery to a sink."""

    id: str
    headers: Mapping[str, str]
    body: bytes


class CloudEventsSink:
    """Posts events to one URL, over at most `connections` connections; an attempt takes at most `timeout_s` seconds.

    `name`, the URL without its secrets, identifies the cursor and appears in the log; another name is another sink.
    """

    def __init__(self, url: str, *, source: str, namespace: str, timeout_s: float, connections: int) -> None:
        self.name = without_credentials(url)
        self._url = url
        self._source = source.rstrip("/")
        self._namespace = namespace
        self._timeout_s = timeout_s
        # No timeouts of its own: they apply to single reads, and a slow, steady response would never exceed them.
        self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=connections))

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
            end = _later(values["time"], record.duration_ms)
            events.append(self._event(record, RESPONSE_TYPE, "response", end, data))
        return events

    async def send(self, event: Event) -> None:
        """Returns when the sink has accepted the event; raises TryAgainError or RefusedError."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._url, headers=event.headers, content=event.body) as response,
            ):
                await _skim(response)
        except TimeoutError:
            raise TryAgainError(f"no answer within {self._timeout_s:g} s") from None
        except httpx2.RequestError as error:
            raise TryAgainError(f"{type(error).__name__}: {error}") from error
        if response.is_success:
            return
        answer = f"it answered {response.status_code}"
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            raise RefusedError(answer)
        raise TryAgainError(answer, retry_after_s(response.headers.get("retry-after", "")))

    async def close(self) -> None:
        await self._client.aclose()

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


def _later(time: datetime | None, duration_ms: float) -> datetime | None:
    try:
        return time and time + timedelta(milliseconds=duration_ms)
    except (OverflowError, ValueError):
        return time


def _traceparent(record: PayloadRecord) -> str:
    """W3C's trace context, https://www.w3.org/TR/trace-context; empty if the record has no span."""
    known = re.fullmatch("[0-9a-f]{32}", record.trace_id) and re.fullmatch("[0-9a-f]{16}", record.span_id)
    return f"00-{record.trace_id}-{record.span_id}-01" if known else ""


async def _skim(response: httpx2.Response) -> None:
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            return


def retry_after_s(value: str) -> float:
    """Parses a Retry-After header, a number of seconds or a date, to seconds; 0 if it is unreadable."""
    if value.isascii() and value.isdigit():
        wait_s = float(value)
    else:
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return 0.0
        # A date without a zone violates the specification; it is read as UTC.
        wait_s = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(wait_s, 0.0), _MAX_RETRY_AFTER_S)


def without_credentials(url: str) -> str:
    """The URL for messages and cursors."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
