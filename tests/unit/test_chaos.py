"""The fault suite's verdicts (right, excused, wrong), and that a seed determines requests and faults."""

from itertools import islice

import pytest

from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord
from tests.chaos.faults import OTHERS, PREDICTORS, faults
from tests.chaos.load import BROKEN, HUNG, Call, Piece
from tests.chaos.oracle import Answer, Oracle, Span
from tests.chaos.records import compare
from tests.chaos.requests import Request, greedy, request_of

STORY = greedy("Once", 3)
ORACLE = Oracle({STORY: Answer("a fox ran", [1, 2, 3], "length")}, {})
WHOLE = (("a", (1,), None), (" fox", (2,), None), (" ran", (3,), "length"))
AWAY = Span(11.5, 12.5)


def call(pieces=WHOLE, way="Generate", **changes):
    """A request that began at 10 and had a piece each second."""
    given = {name: changes.pop(name) for name in ("manner", "variant", "timeout_s") if name in changes}
    begun = changes.pop("begun", 10.0)
    request = Request("name", way, None if way == "refused" else STORY, **given)
    came = [Piece(begun + 1 + number, *piece) for number, piece in enumerate(pieces)]
    return Call(request, begun=begun, ended=begun + 1 + len(came), pieces=came, **changes)


JUDGED = {
    "all of it": (call(), "right"),
    "another text": (call((("a cat", (1,), None),), status="UNAVAILABLE"), "wrong"),
    "a piece twice": (call((*WHOLE[:2], WHOLE[1], WHOLE[2])), "wrong"),
    "other ids": (call((("a", (7,), None), *WHOLE[1:])), "wrong"),
    "less, and all well": (call(WHOLE[:2]), "wrong"),
    "another reason": (call((*WHOLE[:2], (" ran", (3,), "stop"))), "wrong"),
    "its caller left": (call(WHOLE[:1], left=True), "left"),
    "broke off while the gateway was away": (call(WHOLE[:2], status=BROKEN), "excused"),
    "broke with the transformer": (call((), status="502", hop="transformer", begun=11.0), "excused"),
    "broke off later": (call(WHOLE[:1], status="UNAVAILABLE", begun=20.0), "wrong"),
    "hung": (call(WHOLE[:2], status=HUNG), "wrong"),
    "overloaded": (call((), status="RESOURCE_EXHAUSTED"), "wrong"),
    "too late": (call(WHOLE[:2], status="DEADLINE_EXCEEDED", manner="has a deadline", timeout_s=3.0), "late"),
    "too late too soon": (call(WHOLE[:2], status="DEADLINE_EXCEEDED", manner="has a deadline", timeout_s=9.0), "wrong"),
    "too late to begin": (call((), status="RESOURCE_EXHAUSTED", manner="has a deadline", timeout_s=1.0), "shed"),
    "too late without a deadline": (call(WHOLE[:2], status="DEADLINE_EXCEEDED"), "wrong"),
    "refused": (
        call((), "refused", variant="not JSON", status="400", hop="transformer", message="is not JSON"),
        "refused",
    ),
    "refused by another": (
        call((), "refused", variant="not JSON", status="400", hop="gateway", message="is not JSON"),
        "wrong",
    ),
    "answered, though it is wrong": (call(WHOLE[:1], "refused", variant="not JSON"), "wrong"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_oracles_verdicts(case):
    one, outcome = JUDGED[case]
    verdict = ORACLE.judge(one, [AWAY])
    assert verdict.outcome == outcome, verdict
    assert bool(verdict.reason) == (outcome == "wrong")


def record(text="a fox ran", status="OK", **fields):
    return PayloadRecord(text=text, status=status, chunks=[PayloadChunk(text=text)], **fields)


# Calls, their records, and the numbers of lost, doubled and wrong records.
COMPARED = {
    "as it was": (call(), [record()], (0, 0, 0)),
    "none": (call(), [], (1, 0, 0)),
    "none, of an unseen request": (call((), status="UNAVAILABLE"), [], (0, 0, 0)),
    "two": (call(), [record(), record()], (0, 1, 0)),
    "another text": (call(), [record("a cat")], (0, 0, 1)),
    "not all": (call(), [record("a fox", "ABORTED")], (0, 0, 1)),
}


@pytest.mark.parametrize("case", COMPARED)
def test_records_are_compared_with_what_callers_received(case):
    one, records, expected = COMPARED[case]
    found = compare([one], {"name": records}, ORACLE)
    assert (len(found.lost), len(found.doubled), len(found.wrong)) == expected


def test_requests_during_a_full_disk_may_have_no_record():
    found = compare([call()], {}, ORACLE, full_disk=[AWAY])
    assert (found.lost, found.lost_on_full_disk) == ([], 1)


@pytest.mark.parametrize(
    ("way", "statuses", "doubled"),
    [
        ("ModelInfer", ("UNAVAILABLE", "OK"), 0),  # The gateway has sent the call again.
        ("ModelInfer", ("OK", "OK"), 1),
        ("Generate", ("UNAVAILABLE", "OK"), 1),  # A transformer was there all the time.
    ],
)
def test_a_direct_call_may_have_a_record_of_the_attempt_that_its_predictor_lost(way, statuses, doubled):
    records = [record("", status) for status in statuses]
    found = compare([call(way=way)], {"name": records}, ORACLE, predictors=[AWAY])
    assert len(found.doubled) == doubled


def test_the_same_seed_gives_the_same_requests_and_faults():
    assert [request_of(1, number) for number in range(200)] == [request_of(1, number) for number in range(200)]
    assert [request_of(1, number) for number in range(200)] != [request_of(2, number) for number in range(200)]
    for lane in (PREDICTORS, OTHERS):
        assert list(islice(faults(1, lane, 2), 50)) == list(islice(faults(1, lane, 2), 50))
        assert list(islice(faults(1, lane, 2), 50)) != list(islice(faults(2, lane, 2), 50))
