"""Log lines are JSON that names the request, or text for a terminal; a reader that is stuck holds up no call."""

import io
import json
import logging
import os
import pty
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from millrace.telemetry import logs
from millrace.telemetry.identity import set_request_id
from millrace.telemetry.logs import CALLS, call_log, formatter, set_up_logging
from tests.support.measured import Measured


@pytest.fixture
def root():
    """The root logger and the calls' as they were, afterwards."""
    loggers = [logging.getLogger(), logging.getLogger(CALLS)]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


@pytest.fixture
def written(root, monkeypatch):
    """What is written while the block that it gives runs, line by line."""

    def lines(write, log_format="json", level="INFO"):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        close = set_up_logging("predictor", level, log_format, Measured().meter)
        write()
        close()
        return stream.getvalue().splitlines()

    return lines


def test_a_line_is_one_json_object_with_what_it_is_about(written):
    def write():
        logging.getLogger("some.module").warning("two\nlines of %s", "text")

    [line] = written(write)
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {
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
    said = json.loads(line)
    assert said["request_id"] == "mine"
    assert said["trace_id"] == format(write.context.trace_id, "032x")
    assert said["span_id"] == format(write.context.span_id, "016x")


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
    said = json.loads(line)
    assert (said["request_id"], said["duration_ms"], said["logger"]) == ("mine", 1.5, CALLS)


def test_text_for_a_terminal(written):
    def write():
        call_log.write(logging.INFO, "done", (), {"request_id": "mine"})

    [line] = written(write, "console")
    assert line.endswith("INFO    predictor millrace.calls: done request=mine")


def test_lines_below_the_level_are_left_out(written):
    asked = []
    assert written(lambda: asked.append(call_log.writes(logging.INFO)), level="WARNING") == []
    assert asked == [False]


@pytest.mark.parametrize(("is_terminal", "begins"), [(True, "2"), (False, "{")])
def test_auto_is_text_on_a_terminal_and_json_elsewhere(monkeypatch, is_terminal, begins):
    master, slave = pty.openpty() if is_terminal else os.pipe()[::-1]
    try:
        with os.fdopen(os.dup(slave), "w") as stderr:
            monkeypatch.setattr("sys.stderr", stderr)
            record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO", "name": "x"})
            assert formatter("predictor", "auto").format(record).startswith(begins)
    finally:
        os.close(master)
        os.close(slave)


def test_a_stuck_reader_costs_lines_and_no_call(root, monkeypatch):
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
    dropped = measured.value("millrace.log.dropped")
    # One may be in the hands of the thread that is stuck.
    assert dropped in (89, 90)
    released.set()
    close()
