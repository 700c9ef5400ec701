"""Log lines: JSON, one object a line, or text for a terminal; each has the id of its request.

The line of every call goes through a bounded queue to a separate thread: if the reader of standard error stalls, calls
continue, and lost lines are counted. All other lines are rare and written at once.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Literal

from opentelemetry import metrics
from opentelemetry.metrics import Meter
from pythonjsonlogger.json import JsonFormatter

from millrace.telemetry.identity import current_request_id, current_span_id, current_trace_id

CALLS = "millrace.calls"  # The logger of the calls' lines.
LogFormat = Literal["auto", "json", "console"]

_MAX_LINES = 8192
_CLOSE_S = 1.0
_JSON_NAMES = {"levelname": "level", "name": "logger"}


def set_up_logging(service: str, level: str, log_format: LogFormat, meter: Meter | None = None) -> Callable[[], None]:
    """Writes to standard error, `auto` is text where that is a terminal; the returned function writes what waits."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(service, log_format))
    handler.addFilter(_name_request)
    logging.basicConfig(level=level, handlers=[handler], force=True)

    lines = _CallLines(meter)
    writer = _Writer(lines.queue, handler)
    calls = logging.getLogger(CALLS)
    calls.handlers = [lines]
    calls.propagate = False
    writer.start()

    def close() -> None:
        calls.handlers = []
        with suppress(queue.Full):  # Nobody takes what is written: it is lost with the process.
            writer.stop()

    return close


def formatter(service: str, log_format: LogFormat) -> logging.Formatter:
    """What a line looks like."""
    if log_format == "json" or (log_format == "auto" and not sys.stderr.isatty()):
        fields = ["levelname", "name", "message"]
        return JsonFormatter(fields, timestamp="time", rename_fields=_JSON_NAMES, static_fields={"service": service})
    return _ConsoleFormatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s")


class _ConsoleFormatter(logging.Formatter):
    """Text, with the request's id behind it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = super().formatMessage(record)
        request_id = getattr(record, "request_id", "")
        return f"{text} request={request_id}" if request_id else text


class _CallLines(QueueHandler):
    """Puts lines in the queue as they are; counts those for which there is no room."""

    def __init__(self, meter: Meter | None) -> None:
        self.queue: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_LINES)
        super().__init__(self.queue)
        self._dropped = (meter or metrics.get_meter("millrace")).create_counter(
            "millrace.log.dropped", "{line}", "Log lines of calls that were not written."
        )

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # Formatted by the thread that writes it.

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped.add(1)


class _Writer(QueueListener):
    """Writes what is in the queue; at its end there may be no room, for a while, for the word to stop."""

    def enqueue_sentinel(self) -> None:
        self.queue.put(self._sentinel, timeout=_CLOSE_S)  # type: ignore[attr-defined]


def _name_request(record: logging.LogRecord) -> bool:
    """Adds the ids of the request that the line is about, unless the line has them."""
    if not hasattr(record, "request_id"):
        for name, value in (
            ("request_id", current_request_id()),
            ("trace_id", current_trace_id()),
            ("span_id", current_span_id()),
        ):
            if value:
                setattr(record, name, value)
    return True
