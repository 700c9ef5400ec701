"""Log lines: JSON, one object a line, or text for a terminal; each has the id of its request.

The line of every call goes through a bounded queue to a thread, which writes it a twentieth of a second later: if the
reader of standard error stalls, calls continue, and lost lines are counted. All other lines are rare, and written at
once.
"""

import io
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, NamedTuple, TextIO, cast

from opentelemetry import metrics
from opentelemetry.metrics import Counter, Meter
from pythonjsonlogger.json import JsonFormatter

from headrace.errors import may_pass
from headrace.telemetry.identity import current_request_id, span_id_of, trace_id_of

CALLS = "headrace.calls"  # The logger of the calls' lines.
LogFormat = Literal["auto", "json", "console"]

_MAX_LINES = 8192
_CLOSE_S = 1.0
_GATHER_S = 0.05  # Lines that arrive within this time are written together.
_LINES_AT_ONCE = 256
_JSON_NAMES = {"levelname": "level", "name": "logger"}


def set_up_logging(service: str, level: str, log_format: LogFormat, meter: Meter | None = None) -> Callable[[], None]:
    """Writes to standard error, `auto` as text to a terminal; the returned function writes the waiting lines."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(
        sys.stderr if raw is None else cast(TextIO, _WholeLines(raw))
    )
    handler.setFormatter(formatter(service, log_format))
    handler.addFilter(_name_request)
    logging.basicConfig(level=level, handlers=[handler], force=True)

    call_log.start(handler, meter)
    return call_log.close


def formatter(service: str, log_format: LogFormat) -> logging.Formatter:
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


class _WholeLines(io.TextIOBase):
    """Writes to a file on a disk that may be full: what it has no room for is lost, and the next line begins anew."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._is_cut = False  # The last line.

    def write(self, text: str) -> int:
        data = ("\n" * self._is_cut + text).encode(errors="backslashreplace")
        try:
            while data and (written := self._raw.write(data)):
                self._is_cut = data[written - 1 : written] != b"\n"
                data = data[written:]
        except OSError as error:
            if not may_pass(error):
                raise
        return len(text)


class _Line(NamedTuple):
    """A line of a call that is to be written; `created` is its time, seconds since 1970."""

    created: float
    level: int
    text: str
    arguments: tuple[object, ...]
    fields: Mapping[str, object]


class AccessLog:
    """The lines of calls. A call only appends a tuple; a thread formats and writes the lines, many at once.

    Without that thread a line is written at once.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(CALLS)
        self._lines: deque[_Line] = deque()
        self._come = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._dropped: Counter

    def writes(self, level: int) -> bool:
        """Whether lines of a level are written."""
        return self._logger.isEnabledFor(level)

    def write(self, level: int, text: str, arguments: tuple[object, ...], fields: Mapping[str, object]) -> None:
        """Writes `text % arguments`, with `fields` beside it; call it only if `writes` is true."""
        if self._thread is None:
            self._logger.log(level, text, *arguments, extra=dict(fields))
        elif len(self._lines) >= _MAX_LINES:
            self._dropped.add(1)
        else:
            self._lines.append(_Line(time.time(), level, text, arguments, fields))
            if len(self._lines) == 1:
                self._come.set()

    def start(self, handler: logging.StreamHandler[TextIO], meter: Meter | None) -> None:
        """Starts the thread, which gives lines to a handler."""
        self._dropped = (meter or metrics.get_meter("headrace")).create_counter(
            "headrace.log.dropped", "{line}", "Log lines of calls that were not written."
        )
        self._is_closing.clear()
        self._thread = threading.Thread(target=self._run, args=(handler,), name="call-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the waiting lines, within a second, and ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_closing.set()
            self._come.set()
            thread.join(_CLOSE_S)  # If standard error is blocked, the lines are lost with the process.

    def _run(self, handler: logging.StreamHandler[TextIO]) -> None:
        while not self._is_closing.is_set():
            self._come.wait()
            self._is_closing.wait(_GATHER_S)
            self._come.clear()
            while self._lines:
                count = min(len(self._lines), _LINES_AT_ONCE)
                _write_together(handler, [self._lines.popleft() for _ in range(count)])


def _write_together(handler: logging.StreamHandler[TextIO], lines: Sequence[_Line]) -> None:
    """As the handler writes them, but with one system call."""
    text, record = "", None
    with handler.lock or nullcontext():
        for record in filter(handler.filter, map(_record, lines)):
            try:
                text += handler.format(record) + handler.terminator
            except Exception:
                handler.handleError(record)
        try:
            handler.stream.write(text)
            handler.flush()
        except Exception:
            if record is not None:
                handler.handleError(record)


def _record(line: _Line) -> logging.LogRecord:
    record = logging.LogRecord(CALLS, line.level, "", 0, line.text, line.arguments, None)
    record.created = line.created
    record.msecs = line.created % 1 * 1000
    record.__dict__.update(line.fields)
    return record


call_log = AccessLog()


def _name_request(record: logging.LogRecord) -> bool:
    """Adds the ids of the request that the line is about, unless the line has them."""
    if not hasattr(record, "request_id"):
        for name, value in (
            ("request_id", current_request_id()),
            ("trace_id", trace_id_of()),
            ("span_id", span_id_of()),
        ):
            if value:
                setattr(record, name, value)
    return True
