"""A request that would miss its deadline is refused at once; a resumed answer does not make others look slow."""

import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import OverloadedError
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import ContextLimits
from headrace_transformer.generation.admission import Admission
from headrace_transformer.generation.requests import TextRequest
from tests.support.text_chunks import text_chunk

MODEL = SimpleNamespace(name="m", limits=ContextLimits(1024, is_encoder_decoder=False))


def request(deadline=NO_DEADLINE, arrived=None, client="", **sampling):
    arrived = time.monotonic() if arrived is None else arrived
    metadata = (("x-headrace-client", client),) if client else ()
    call = CallContext("a.Service/Method", "id", metadata, deadline, arrived)
    return TextRequest(call, "m", prompt="p", sampling=sampling)


@contextmanager
def answering(admission, token_s, away=range(0), answers=32, steps=40, **sampling):
    """Answers that run side by side until now; half of them have no token in the steps `away`, then are resumed."""
    arrived = time.monotonic() - steps * token_s
    with ExitStack() as stack:
        admitted = [
            stack.enter_context(admission.admitted(request(arrived=arrived, **sampling), MODEL)) for _ in range(answers)
        ]
        for step in range(steps):
            for answer, one in enumerate(admitted):
                if answer % 2 or step not in away:
                    is_resumed = answer % 2 == 0 and step == away.stop
                    one.chunk(text_chunk("", [1], elapsed_s=step * token_s, resumed=is_resumed))
        yield


def is_refused(admission, timeout_s=None, client=""):
    try:
        with admission.admitted(request(Deadline.after(timeout_s), client=client, max_tokens=200), MODEL):
            return False
    except OverloadedError:
        return True


def test_a_resumed_answer_does_not_count_as_slow():
    admission = Admission()
    with answering(admission, token_s=0.01, away=range(5, 195), steps=200):
        assert not is_refused(admission, 12.0)


def test_while_answers_are_slow_requests_that_would_be_late_are_refused():
    admission = Admission()
    with answering(admission, token_s=0.2):
        assert is_refused(admission, 5.0)
        assert not is_refused(admission, 500.0)
        assert not is_refused(admission)


def test_answers_with_a_pace_do_not_make_others_look_slow():
    admission = Admission()
    with answering(admission, token_s=0.2, pace=5):
        assert not is_refused(admission, 5.0)


@pytest.mark.parametrize("pace", [10_000, "0", "fast"])
def test_slow_answers_count_where_their_pace_does_not_delay_them(pace):
    admission = Admission()
    with answering(admission, token_s=0.2, pace=pace):
        assert is_refused(admission, 5.0)


def test_a_client_without_waiting_requests_is_not_refused_for_another_client_s_queue():
    admission = Admission()
    with answering(admission, token_s=0.01), ExitStack() as queue:
        for _ in range(300):
            queue.enter_context(admission.admitted(request(), MODEL))
        assert is_refused(admission, 12.0)
        assert not is_refused(admission, 12.0, client="light")
