"""A record ends with the status that its caller gets, however late the recording of the call began."""

import asyncio
import time

import pytest

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import NotFoundError
from headrace.payload.call import recorded
from headrace.rpc.server.call_context import CallContext


class FakeRecording:
    def __init__(self):
        self.ends = []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            self.end(kind.__name__)

    def end(self, status, message=""):
        self.ends.append(status)


class FakeTap:
    class rules:  # noqa: N801
        metadata = ("x-team",)

    def begin(self, begin, inputs):
        self.begun, self.recording = begin, FakeRecording()
        return self.recording


def record(deadline, error=None):
    """The statuses that the record is given, the first of which counts."""
    tap = FakeTap()
    call = CallContext("a.Service/Method", "id", (("x-team", "a"), ("x-team", "b"), ("x-other", "c")), deadline)

    def work():
        with recorded(tap, call, "m"):
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    assert tap.begun.metadata == {"x-team": "a, b"}
    return tap.recording.ends


def test_a_cancel_after_the_deadline_counts_as_the_deadline_and_any_other_end_as_itself():
    passed = Deadline(time.monotonic() - 1)
    assert record(NO_DEADLINE) == ["OK"]
    assert record(passed, asyncio.CancelledError())[0] == "DEADLINE_EXCEEDED"
    assert record(Deadline.after(0.01), GeneratorExit())[0] == "DEADLINE_EXCEEDED"
    for deadline in (Deadline.after(60.0), NO_DEADLINE):
        assert record(deadline, asyncio.CancelledError())[0] == "CancelledError"
    assert record(passed, NotFoundError("no model"))[0] == "NotFoundError"
