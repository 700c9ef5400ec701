"""Frames to records: however they interleave, each record is the sum of its parts."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from headrace.payload.outbox.merge import Merger, fit
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord, PayloadTensor
from headrace_protos.spool_pb2 import Frame

HUGE = 1 << 40


def key(number):
    return uuid.UUID(int=number).bytes


def frame(number, kind, replaces_chunks=False, **part):
    contents = [PayloadRecord(**part).SerializeToString()]
    return Frame(record_id=key(number), kind=kind, part=contents, replaces_chunks=replaces_chunks).SerializeToString()


def frames_of(number, texts):
    yield frame(number, Frame.BEGIN, request_id=str(number), prompt="p")
    for text in texts:
        yield frame(number, Frame.CHUNK, chunks=[PayloadChunk(text=text)])
    yield frame(number, Frame.END, status="OK", prompt="q")


@given(st.lists(st.lists(st.text(max_size=3), max_size=5), max_size=6), st.randoms(use_true_random=False))
def test_records_are_whole_however_their_frames_interleave(answers, random):
    waiting = {number: list(frames_of(number, texts)) for number, texts in enumerate(answers)}
    merger, ended, at = Merger(HUGE, "here"), {}, 0
    while waiting:
        number = random.choice(sorted(waiting))
        at += 1
        whole = merger.take(at, waiting[number].pop(0))
        if whole is not None:
            assert whole.sequence == at
            ended[number] = whole.record
        if not waiting[number]:
            del waiting[number]
    for number, texts in enumerate(answers):
        record = ended[number]
        assert (record.request_id, record.prompt, record.status) == (str(number), "q", "OK")
        assert [chunk.text for chunk in record.chunks] == texts
        assert record.text == "".join(texts)
    assert (merger.open_bytes, merger.first_began) == (0, None)


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 5))
def test_a_snapshot_replaces_all_frames_before_it(texts, after):
    frames = list(frames_of(1, texts))
    cut = min(after, len(texts)) + 1
    original, again = Merger(HUGE, "here"), Merger(HUGE, "here")
    for number, payload in enumerate(frames[:cut], 1):
        original.take(number, payload)
    [snapshot] = original.snapshots(before=2)
    again.take(cut + 1, snapshot)
    original.take(cut + 1, snapshot)
    assert original.first_began == again.first_began == cut + 1
    assert original.snapshots(before=2) == []
    for number, payload in enumerate(frames[cut:], cut + 2):
        wholes = original.take(number, payload), again.take(number, payload)
    assert wholes[0] == wholes[1]
    assert wholes[0].record.text == "".join(texts)
    assert wholes[0].began == cut + 1


def test_an_end_may_replace_the_chunks_before():
    merger = Merger(HUGE, "here")
    merger.take(1, frame(1, Frame.BEGIN))
    merger.take(2, frame(1, Frame.CHUNK, chunks=[PayloadChunk(offset_ms=5)], ttft_ms=5))
    whole = merger.take(
        3, frame(1, Frame.END, replaces_chunks=True, chunks=[PayloadChunk(offset_ms=5, text="whole")], status="OK")
    )
    assert [(chunk.offset_ms, chunk.text) for chunk in whole.record.chunks] == [(5, "whole")]
    assert (whole.record.text, whole.record.ttft_ms) == ("whole", 5)


def test_records_without_an_end_are_aborted_under_the_same_number_each_time():
    frames = [
        frame(1, Frame.BEGIN, request_id="a"),
        frame(2, Frame.BEGIN, request_id="b"),
        frame(1, Frame.CHUNK, chunks=[PayloadChunk(offset_ms=7, text="so far")]),
        frame(3, Frame.BEGIN, request_id="c"),
        frame(3, Frame.END, status="OK"),
    ]
    readings = []
    for _ in range(2):
        merger = Merger(HUGE, "here")
        for number, payload in enumerate(frames, 1):
            merger.take(number, payload)
        aborted = []
        while (whole := merger.abort()) is not None:
            aborted.append(whole)
        readings.append(aborted)
    assert readings[0] == readings[1]
    [first, second] = readings[0]
    assert 5 < first.sequence < second.sequence < 2**63
    assert (first.record.request_id, first.record.status, first.record.failed_hop) == ("a", "ABORTED", "here")
    assert (first.record.text, first.record.duration_ms) == ("so far", 7)
    assert first.record.message
    assert (second.record.request_id, second.record.status) == ("b", "ABORTED")


def test_parts_without_a_begin_and_frames_of_unknown_kind_are_skipped():
    merger = Merger(HUGE, "here")
    assert merger.take(1, frame(1, Frame.CHUNK, chunks=[PayloadChunk(text="x")])) is None
    assert merger.take(2, frame(1, Frame.END, status="OK")) is None
    assert merger.take(3, b"\xff\xff") is None
    assert merger.take(4, frame(1, Frame.BEGIN)) is None
    assert merger.take(5, frame(1, 9)) is None
    assert merger.take(6, frame(1, Frame.END, status="OK")) is not None


def test_missing_frames_mark_all_open_records_as_possibly_incomplete():
    merger = Merger(HUGE, "here")
    merger.take(1, frame(1, Frame.BEGIN))
    merger.take(3, frame(2, Frame.BEGIN))
    assert merger.take(4, frame(1, Frame.END, status="OK")).record.incomplete
    assert not merger.take(5, frame(2, Frame.END, status="OK")).record.incomplete


def test_an_open_record_grows_no_further_than_a_message_may():
    merger = Merger(10_000, "here")
    merger.take(1, frame(1, Frame.BEGIN))
    for number in range(2, 200):
        merger.take(number, frame(1, Frame.CHUNK, chunks=[PayloadChunk(text="x" * 100)]))
    assert merger.open_bytes <= 10_000
    [snapshot] = merger.snapshots(before=2)
    merger.take(200, snapshot)
    whole = merger.take(201, frame(1, Frame.END, status="OK"))
    assert whole.record.incomplete
    assert 0 < len(whole.record.chunks) < 100
    assert whole.record.status == "OK"


def test_a_record_that_is_too_large_loses_its_least_important_parts():
    def record():
        return PayloadRecord(
            prompt="p" * 100,
            text="t" * 100,
            chunks=[PayloadChunk(text="t" * 100, token_ids=range(100, 200), logprobs=[1.0] * 100)],
            inputs=[PayloadTensor(name="x", data=bytes(1000))],
        )

    whole = record()
    assert fit(whole, 10_000)
    assert whole == record()
    for limit, tokens, chunks, contents in (
        (1600, False, True, True),
        (1300, False, False, True),
        (500, False, False, False),
    ):
        smaller = record()
        assert fit(smaller, limit)
        assert smaller.ByteSize() <= limit
        assert smaller.incomplete
        assert any(chunk.token_ids for chunk in smaller.chunks) == tokens
        assert bool(smaller.chunks) == chunks
        assert smaller.inputs[0].HasField("data") == contents
        assert smaller.text
    assert not fit(record(), 100)


def test_begins_of_a_journal_are_aborted_unless_their_frames_have_come():
    merger = Merger(HUGE, "here")
    merger.take(1, frame(1, Frame.BEGIN, request_id="1"))
    merger.take(2, frame(2, Frame.WHOLE, request_id="2", status="OK"))
    merger.take(3, frame(3, Frame.BEGIN, request_id="3"))
    merger.take(4, frame(3, Frame.END, status="OK"))
    journal = [*(frame(number, Frame.BEGIN, request_id=str(number)) for number in range(1, 6)), b"\xff"]
    merger.take_journal(journal)
    aborted = []
    while (ended := merger.abort()) is not None:
        aborted.append(ended)
    assert [(ended.record.request_id, ended.record.status) for ended in aborted] == [
        (number, "ABORTED") for number in ("1", "4", "5")
    ]
    sequences = [ended.sequence for ended in aborted]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] < 1 << 63
    assert not any(ended.record.incomplete for ended in aborted)
    assert merger.open_bytes == 0
