"""Log lines are JSON that names the request, or text for a terminal; a reader that is stuck blocks no call."""

import errno
import io
import json
import logging
import os
import pty
import threading
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from headrace.telemetry import logs
from headrace.telemetry.identity import set_request_id
from headrace.telemetry.logs import CALLS, call_log, formatter, set_up_logging
from tests.support.measured import Measured


@pytest.fixture
def root():
    """The root logger; it and the one of calls are restored afterwards."""
    loggers = [logging.getLogger(), logging.getLogger(CALLS)]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


@pytest.fixture
def written(root, monkeypatch):
    """A function that returns the lines that are written while its argument runs."""

    def lines(write, log_format="json", level="INFO"):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        close = set_up_logging("predictor", level, log_format, Measured().meter)
        write()
        close()
        return stream.getvalue().splitlines()

    return lines


def test_a_line_is_one_json_object_with_its_fields(written):
    def write():
        logging.getLogger("some.module").warning("two\nlines of %s", "text")

    [line] = written(write)
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "WARNING",
        "logger": "some.module",
        "message": "two\nlines of text",
        "service": "predictor",
    }


def test_a_line_inside_of_a_request_names_the_request_and_its_trace(written):
    def write():
        with trace.use_span(TracerProvider().get_tracer("test").start_span("call")) as span:
            set_request_id("mine")
            logging.getLogger("some.module").info("hello")
            set_request_id("")
            write.context = span.get_span_context()

    [line] = written(write)
    fields = json.loads(line)
    assert fields["request_id"] == "mine"
    assert fields["trace_id"] == format(write.context.trace_id, "032x")
    assert fields["span_id"] == format(write.context.span_id, "016x")


def test_an_exception_stays_in_its_line(written):
    def write():
        try:
            raise ZeroDivisionError("no")
        except ZeroDivisionError:
            logging.getLogger("some.module").exception("failed")

    [line] = written(write)
    assert "ZeroDivisionError: no" in json.loads(line)["exc_info"]


def test_the_line_of_a_call_has_its_own_fields_and_is_written_by_another_thread(written):
    def write():
        call_log.write(logging.INFO, "done", (), {"request_id": "mine", "duration_ms": 1.5})

    [line] = written(write)
    fields = json.loads(line)
    assert (fields["request_id"], fields["duration_ms"], fields["logger"]) == ("mine", 1.5, CALLS)


def test_text_for_a_terminal(written):
    def write():
        call_log.write(logging.INFO, "done", (), {"request_id": "mine"})

    [line] = written(write, "console")
    assert line.endswith("INFO    predictor headrace.calls: done request=mine")


def test_lines_below_the_level_are_left_out(written):
    enabled = []
    assert written(lambda: enabled.append(call_log.writes(logging.INFO)), level="WARNING") == []
    assert enabled == [False]


@pytest.mark.parametrize(("is_terminal", "begins"), [(True, "2"), (False, "{")])
def test_auto_format_is_text_on_a_terminal_and_json_elsewhere(monkeypatch, is_terminal, begins):
    master, slave = pty.openpty() if is_terminal else os.pipe()[::-1]
    try:
        with os.fdopen(os.dup(slave), "w") as stderr:
            monkeypatch.setattr("sys.stderr", stderr)
            record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO", "name": "x"})
            assert formatter("predictor", "auto").format(record).startswith(begins)
    finally:
        os.close(master)
        os.close(slave)


def test_a_stuck_reader_loses_lines_and_blocks_no_call(root, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_LINES", 10)
    released, measured = threading.Event(), Measured()

    class Stuck(io.StringIO):
        def write(self, text):
            released.wait()
            return super().write(text)

    monkeypatch.setattr("sys.stderr", Stuck())
    close = set_up_logging("predictor", "INFO", "json", measured.meter)
    for _ in range(100):
        call_log.write(logging.INFO, "done", (), {"request_id": ""})
    dropped = measured.value("headrace.log.dropped")
    # The stuck thread may hold one.
    assert dropped in (89, 90)
    released.set()
    close()


def test_a_full_disk_loses_lines_and_joins_none(root, monkeypatch):
    class Disk(io.RawIOBase):
        contents, room = b"", 0

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "no space")
            taken = data[: self.room]
            self.room -= len(taken)
            self.contents += taken
            return len(taken)

    disk = Disk()
    monkeypatch.setattr("sys.stderr", SimpleNamespace(buffer=SimpleNamespace(raw=disk), isatty=lambda: False))
    close = set_up_logging("predictor", "INFO", "json", Measured().meter)
    for number, room in enumerate((1000, 20, 0, 1000, 1000)):
        disk.room = room
        logging.getLogger("some.module").warning("line %d", number)
    close()
    whole, cut, *later = disk.contents.decode().splitlines()
    assert len(cut) == 20
    assert [json.loads(line)["message"] for line in (whole, *later)] == ["line 0", "line 3", "line 4"]
