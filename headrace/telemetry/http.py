"""The client's side of an HTTP call: its span, its duration, and the headers that identify the request.

Source of the names: OpenTelemetry semantic conventions, "HTTP spans" and "HTTP metrics". A background call
(suppression.py) has neither span nor duration.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import SpanKind, Status, Tracer
from opentelemetry.trace import StatusCode as SpanStatus

from headrace.telemetry.identity import REQUEST_ID, carried_headers, current_request_id
from headrace.telemetry.rpc import duration_histogram
from headrace.telemetry.suppression import is_tracing_suppressed

_STATUS = "http.response.status_code"


@dataclass
class HttpCall:
    """One call: the headers to send, and the answer's status, which the caller sets."""

    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None


class HttpClientSpans:
    """Opens and ends the spans of calls to one `address`, host:port."""

    def __init__(self, address: str, tracer: Tracer | None = None, meter: Meter | None = None) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._server: dict[str, str | int] = {"server.address": host, "server.port": int(port)}
        self._tracer = tracer or trace.get_tracer("headrace")
        self._duration = duration_histogram(meter, "http.client.request.duration")

    @contextmanager
    def call(self, method: str, template: str, path: str) -> Iterator[HttpCall]:
        """Makes a span for the call in the block; `template` is the path with names for its variable parts."""
        if is_tracing_suppressed():
            yield HttpCall(carried_headers())
            return
        began, error = time.monotonic(), ""
        attributes: dict[str, str | int] = {"http.request.method": method, "url.template": template, **self._server}
        named: dict[str, str | int] = {"url.full": f"http://{self._address}{path}", REQUEST_ID: current_request_id()}
        span = self._tracer.start_span(f"{method} {template}", None, SpanKind.CLIENT, attributes | named)
        call = HttpCall(carried_headers(trace.set_span_in_context(span)))
        try:
            yield call
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            if call.status is not None:
                attributes[_STATUS] = call.status
                span.set_attribute(_STATUS, call.status)
                error = str(call.status) if call.status >= 400 else error
            if error:
                attributes["error.type"] = error
                span.set_attribute("error.type", error)
                span.set_status(Status(SpanStatus.ERROR))
            span.end()
            self._duration.record(time.monotonic() - began, attributes)
