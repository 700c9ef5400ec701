"""A record whose request is answered at once is one frame, with the same contents as in several."""

import time

import pytest

from headrace.payload.drops import FAILED, Drops
from headrace.payload.outbox.frames import FrameEncoder
from headrace.payload.outbox.framing import Framing
from headrace.payload.outbox.merge import Merger
from headrace.payload.outbox.pending import PENDING_S
from headrace.payload.parts import (
    BEGIN_CHARACTERS,
    BeginPart,
    ChunkPart,
    EndPart,
    Fields,
    InputsPart,
    PartQueue,
    RecordedTensor,
)
from headrace.payload.redaction import parse_redactions
from headrace.payload.rules import PayloadRules
from headrace_protos.spool_pb2 import Frame

ID = bytes(range(16))
TENSOR = RecordedTensor("x", "INT64", (1, 8), None, 64)
FIELDS = Fields("request", "model", "prompt", '{"a": 1}', "trace", "span", "client", "call", {"header": "value"})
RULES = {
    "none": PayloadRules(),
    "redaction": PayloadRules(redactions=parse_redactions('[{"pattern": "prom"}, {"path": "$.parameters.a"}]')),
}


def begin(fields=FIELDS, age_s=0.0, awaited=False):
    arrived = time.monotonic() - age_s
    return BeginPart(ID, 100, 1_700_000_000_123_456, arrived, "protocol", fields, lambda: None, lambda: awaited)


def inputs(*tensors):
    return InputsPart(ID, 10, tensors or (TENSOR,))


def end(status="OK", message="", outputs=(TENSOR,), text=None):
    return EndPart(ID, 20, status, message, "", "", None, text, outputs, None, 12.5, 0, "", "", False, None)


def chunk(offset_ms=1.0, outputs=()):
    return ChunkPart(ID, 5, offset_ms, "text", (), (), outputs)


class Slices:
    """Takes parts and gives the frames that the framing makes of them."""

    def __init__(self, rules=RULES["none"]):
        self.queue = PartQueue(1 << 20)
        self.drops = Drops()
        self.settled = []
        self.framing = Framing(self.queue, FrameEncoder(rules, 1 << 20), self.drops, self.settle)

    def settle(self, parts):
        self.settled += parts
        return False

    def put(self, first, *others):
        self.queue.begin(first)
        for part in others:
            self.queue.put(part)

    def frames(self, is_last=False, begins_alone=False):
        framed = self.framing.slice(is_last, begins_alone)
        self.queue.taken(self.framing.cost)
        return [Frame.FromString(frame.payload) for frame in framed]


def merged(frames):
    merger = Merger(1 << 20, "hop")
    records = [merger.take(number, frame.SerializeToString()) for number, frame in enumerate(frames, start=1)]
    [record] = [record.record for record in records if record is not None]
    return record


def kinds(frames):
    return [Frame.Kind.Name(frame.kind) for frame in frames]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "last",
    [end(), end("INVALID_ARGUMENT", "m" * 9000, ()), end("INTERNAL", "no", ()), end(outputs=(), text="text")],
    ids=["answered", "refused", "failed", "text"],
)
def test_one_frame_has_the_same_contents_as_several(rules, last):
    together, apart = Slices(rules), Slices(rules)
    together.put(begin(), inputs(), last)
    whole = together.frames()
    apart.put(begin(awaited=True), inputs())
    several = apart.frames()
    apart.queue.put(last)
    several += apart.frames()
    assert kinds(whole) == ["WHOLE"]
    assert kinds(several) == ["BEGIN", "CHUNK", "END"]
    assert merged(whole) == merged(several)
    assert together.queue.empty
    assert apart.queue.empty


@pytest.mark.parametrize("awaited", [False, True])
def test_between_two_polls_only_awaited_begins_are_written(awaited):
    slices = Slices()
    slices.put(begin(age_s=2 * PENDING_S, awaited=awaited), chunk(1.0), chunk(2.0), end())
    assert kinds(slices.frames(begins_alone=True)) == ["BEGIN"] * awaited
    frames = slices.frames()
    assert kinds(frames) == [*["BEGIN"] * (not awaited), "CHUNK", "END"]
    assert slices.queue.empty


def test_a_mark_stays_behind_its_whole_record():
    slices = Slices()
    slices.put(begin(), end())
    [frame] = slices.frames()
    frame.part.append(b"")
    assert merged([frame]).status == "OK"


def test_a_begin_waits_for_its_end_and_then_counts_as_written():
    slices = Slices()
    slices.put(begin(), inputs())
    assert slices.frames() == []
    assert slices.framing.requests == 1
    assert not slices.queue.empty
    slices.queue.put(end())
    assert kinds(slices.frames()) == ["WHOLE"]
    assert slices.framing.requests == 0
    assert slices.queue.empty


@pytest.mark.parametrize(
    ("first", "is_last"),
    [(begin(awaited=True), False), (begin(age_s=PENDING_S), False), (begin(), True)],
    ids=["an answer waits", "it has waited", "the process ends"],
)
def test_a_begin_whose_end_is_not_awaited_is_written_alone(first, is_last):
    slices = Slices()
    slices.put(first, inputs())
    assert kinds(slices.frames(is_last)) == ["BEGIN", "CHUNK"]
    assert slices.queue.empty


def test_a_record_with_chunks_is_written_part_by_part():
    slices = Slices()
    slices.put(begin(), chunk(), end())
    assert kinds(slices.frames()) == ["BEGIN", "CHUNK", "END"]


def test_chunks_of_a_slice_are_one_frame_with_their_tensors():
    slices = Slices()
    slices.put(begin(), *(chunk(n, [TENSOR._replace(shape=(n,))]) for n in range(3)), end())
    frames = slices.frames()
    assert kinds(frames) == ["BEGIN", "CHUNK", "END"]
    chunks = merged(frames).chunks
    assert [(one.offset_ms, list(one.outputs[0].shape)) for one in chunks] == [(0, [0]), (1, [1]), (2, [2])]


def test_a_chunk_that_cannot_be_encoded_does_not_affect_others():
    slices = Slices()
    bad = [RecordedTensor("x", "INT64", ("no number",), None)]
    slices.put(begin(), chunk(1), chunk(2, bad), chunk(3), end())
    record = merged(slices.frames())
    assert [one.offset_ms for one in record.chunks] == [1, 3]
    assert slices.drops.counts == {FAILED: 1}


def test_a_long_request_is_written_part_by_part():
    slices = Slices()
    slices.put(begin(FIELDS._replace(prompt="p" * (BEGIN_CHARACTERS + 1))), end())
    assert kinds(slices.frames()) == ["BEGIN", "END"]


def test_a_part_that_cannot_be_encoded_does_not_affect_others():
    slices = Slices()
    slices.put(begin(), inputs(RecordedTensor("x", "INT64", ("no number",), None)), end())
    frames = slices.frames()
    assert kinds(frames) == ["BEGIN", "END"]
    record = merged(frames)
    assert (record.prompt, record.status, len(record.outputs)) == ("prompt", "OK", 1)
    assert slices.drops.counts == {FAILED: 1}
