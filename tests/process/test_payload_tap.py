"""The payload tap: it never delays a stream, is bounded, and records what happened."""

import asyncio
import hashlib
import logging
import threading
import time
import uuid
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OverloadedError
from headrace.oip.tensors import Tensor, add_input
from headrace.payload import drops
from headrace.payload import outbox as payload_outbox
from headrace.payload import recording as recording_module
from headrace.payload import tap as tap_module
from headrace.payload.drops import DISK, FAILED, MEMORY, TOO_LARGE
from headrace.payload.parts import DeferredTensors, RecordedTensor
from headrace.payload.records import as_uuid7, next_id
from headrace.payload.redaction import Redaction
from headrace.payload.rules import Digest, Mode, PayloadRules
from headrace.payload.tensors import request_tensors
from headrace.payload.writer import LATE_S
from headrace_protos.headrace_pb2 import Usage
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.support.payload_ingest import away, begin, segments, tap_of
from tests.support.small_disk import small_disk
from tests.waiting import until

# With such rules a thread writes, and answers wait for it.
REDACTING = PayloadRules(redactions=[Redaction("$.parameters.absent", None)])


def full(tap, patch):
    """Leaves the outbox of a tap no room on its disk."""
    outbox = tap._boxes[0]
    patch.setattr(outbox, "append", lambda *_, **__: False)
    patch.setattr(outbox, "prepare", lambda _: None)
    patch.setattr(outbox, "refusal", DISK)


async def recorded(tap, ingest):
    """The logger's records after everything is shipped."""
    assert await tap.drain(30)
    return ingest.records


async def test_a_record_has_all_recorded_parts(taps, ingest):
    tap = taps.start(ingest.target)
    recording = begin(
        tap, protocol="headrace.v1.TextGeneration/Generate", prompt="p", parameters="{}",
        trace_id="t", span_id="s", metadata={"user-agent": "u"}, client="c", call_id="i",
    )  # fmt: skip
    recording.chunk("", [])
    recording.chunk("Once ", [5, 6], [-0.5, -1.5])
    recording.chunk("upon", [7])
    recording.fingerprint = "f"
    recording.end("OK", finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=3))
    [record] = await recorded(tap, ingest)
    assert (record.record_id, record.fingerprint) == (recording.record_id, "f")
    assert (record.request_id, record.model, record.prompt, record.parameters, record.trace_id) == (
        "r", "m", "p", "{}", "t",
    )  # fmt: skip
    assert (record.span_id, dict(record.metadata), record.client, record.call_id) == (
        "s",
        {"user-agent": "u"},
        "c",
        "i",
    )
    assert record.protocol == "headrace.v1.TextGeneration/Generate"
    assert (record.status, record.finish_reason, record.text) == ("OK", "stop", "Once upon")
    assert [(chunk.text, list(chunk.token_ids), list(chunk.logprobs)) for chunk in record.chunks] == [
        ("", [], []), ("Once ", [5, 6], [-0.5, -1.5]), ("upon", [7], []),
    ]  # fmt: skip
    assert record.usage.completion_tokens == 3
    offsets = [chunk.offset_ms for chunk in record.chunks]
    assert offsets == sorted(offsets)
    assert record.ttft_ms == offsets[1], "the first token is in the first chunk with token ids"
    assert record.duration_ms >= offsets[-1]
    assert record.time.nanos % 1000 == 0, "the store keeps microseconds"
    assert not record.incomplete


CARDS, SEED = Redaction(None, "[0-9]{16}"), Redaction("$.parameters.seed", None)


@pytest.mark.parametrize(
    ("rules", "prompt", "ids", "sampling"),
    [
        (PayloadRules(), "Once", [5, 6], '{"seed":7}'),
        (PayloadRules(default=Mode.REQUEST), "Once", [5, 6], '{"seed":7}'),
        (PayloadRules(default=Mode.METADATA), "Once", [], ""),
        (PayloadRules(redactions=[CARDS]), "Once", [5, 6], '{"seed": 7}'),
        (PayloadRules(redactions=[CARDS]), "Once" * 5000 + "4242424242424242", [], '{"seed": 7}'),
        (PayloadRules(redactions=[CARDS]), "[5, 6]", [], '{"seed": 7}'),
        (PayloadRules(redactions=[SEED]), "Once", [], '{"seed": null}'),
    ],
)
async def test_what_repeats_a_generation_is_kept_as_the_request_is(taps, ingest, rules, prompt, ids, sampling):
    tap = taps.start(ingest.target, rules)
    recording = begin(tap, prompt=prompt, parameters='{"seed": 7}')
    assert await recording.flushed()
    recording.prompt_ids, recording.sampling, recording.prompt_kind = [5, 6], '{"seed":7}', "text"
    recording.chunk("upon", [7])
    recording.end("OK", finish_reason="stop")
    [record] = await recorded(tap, ingest)
    assert (list(record.prompt_ids), record.sampling) == (ids, sampling)
    assert record.prompt_kind == ("text" if sampling else "")
    assert "4242424242424242" not in record.prompt
    assert not record.incomplete


@pytest.mark.parametrize("mode", [Mode.ALL, Mode.METADATA])
async def test_an_interrupted_answer_has_the_usage_so_far(taps, ingest, mode):
    tap = taps.start(ingest.target, PayloadRules(default=mode))
    with begin(tap) as recording:
        assert await recording.flushed()
        recording.prompt_tokens = 7
        recording.chunk("Once ", [5, 6])
        recording.chunk("upon", [7])
    begin(tap).end("CANCELLED")  # Ended before its first token.
    cut, before = sorted(await recorded(tap, ingest), key=lambda record: -record.usage.prompt_tokens)
    assert (cut.status, cut.usage) == ("CANCELLED", Usage(prompt_tokens=7, completion_tokens=3))
    assert not before.HasField("usage")


async def test_only_the_first_end_counts(taps, ingest):
    tap = taps.start(ingest.target)
    with begin(tap) as recording:
        recording.end("OK")
        recording.end("INTERNAL")
        recording.chunk("late", [1])
    [record] = await recorded(tap, ingest)
    assert record.status == "OK"
    assert not record.chunks


@pytest.mark.parametrize(
    ("error", "status", "message", "hop"),
    [
        (None, "CANCELLED", "aborted", ""),
        (asyncio.CancelledError(), "CANCELLED", "aborted", ""),
        (GeneratorExit(), "CANCELLED", "aborted", ""),
        (OverloadedError("full", hop="predictor"), "RESOURCE_EXHAUSTED", "full", "predictor"),
        (OverloadedError("full"), "RESOURCE_EXHAUSTED", "full", "transformer"),
        (RuntimeError("secret"), "INTERNAL", "internal error", "transformer"),
    ],
    ids=repr,
)
async def test_a_block_left_without_an_end_ends_its_record(taps, ingest, error, status, message, hop):
    tap = taps.start(ingest.target)
    with suppress(BaseException), begin(tap):
        if error is not None:
            raise error
    [record] = await recorded(tap, ingest)
    assert (record.status, record.message, record.failed_hop) == (status, message, hop)


async def test_chunks_that_are_written_together_stay_with_their_records(taps, ingest):
    tap = taps.start(ingest.target)
    with begin(tap, "a") as first, begin(tap, "b") as second:
        for number in range(30):
            tensors = [RecordedTensor("y", "INT32", (1,), bytes(4))] if number == 15 else ()
            first.chunk(f"a{number} ", [number], outputs=tensors)
            second.chunk(f"b{number} ", [100 + number])
        first.end("OK")
        second.end("OK")
    records = {record.request_id: record for record in await recorded(tap, ingest)}
    for name, base in (("a", 0), ("b", 100)):
        chunks = records[name].chunks
        assert [chunk.text for chunk in chunks] == [f"{name}{number} " for number in range(30)]
        assert [list(chunk.token_ids) for chunk in chunks] == [[base + number] for number in range(30)]
        assert records[name].ttft_ms == chunks[0].offset_ms


async def test_chunks_are_on_disk_after_40_ms_even_if_the_event_loop_comes_to_no_timer(taps, monkeypatch):
    tap = taps.start()
    clock = SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns)
    monkeypatch.setattr(recording_module, "time", clock)
    now = 1000.0
    recording = begin(tap)
    assert await recording.flushed()

    def are_on_disk(*texts):  # Nothing is awaited: the event loop has no turn.
        contents = b"".join(path.read_bytes() for path in segments(taps.spool))
        return [text.encode() in contents for text in texts]

    recording.chunk("first")
    now += LATE_S / 2
    recording.chunk("second")
    assert are_on_disk("first", "second") == [False, False]
    now += LATE_S / 2
    recording.chunk("third")
    assert are_on_disk("first", "second", "third") == [True, True, True]
    recording.chunk("fourth")
    assert are_on_disk("fourth") == [False]
    await until(lambda: are_on_disk("fourth") == [True])
    recording.end("OK")


async def test_a_chunk_that_cannot_be_written_affects_no_other(taps, ingest):
    tap = taps.start(ingest.target)
    with begin(tap) as recording:
        for number in range(3):
            recording.chunk(f"{number}", ["a"] if number == 1 else [number])
        recording.end("OK")
    [record] = await recorded(tap, ingest)
    assert [chunk.text for chunk in record.chunks] == [f"{number}" for number in (0, 2)]
    assert record.ttft_ms
    assert record.incomplete
    assert tap.dropped == {FAILED: 1}


@pytest.mark.parametrize(
    "misuse",
    [
        lambda recording: recording.chunk("x", None),
        lambda recording: recording.chunk("x", [2**40]),
        lambda recording: recording.chunk("x", outputs=[object()]),
        lambda recording: setattr(recording, "resumes", "often"),
        lambda recording: recording.end("OK", usage="no usage"),
        lambda recording: recording.end("OK", outputs=DeferredTensors(lambda: [1], 1)),
    ],
)
async def test_misuse_is_counted_and_never_raised(taps, ingest, misuse):
    tap = taps.start(ingest.target)
    with begin(tap, prompt="p") as recording:
        misuse(recording)
    [record] = await recorded(tap, ingest)
    assert record.incomplete
    assert (record.request_id, record.prompt) == ("r", "p")
    assert tap.dropped == {FAILED: 1}


async def test_a_begin_that_cannot_be_kept_drops_its_record(taps, ingest):
    tap = taps.start(ingest.target)
    with begin(tap, prompt=7) as recording:
        await recording.flushed()
        recording.chunk("x", [1])
    assert await recorded(tap, ingest) == []
    assert tap.dropped == {FAILED: 1}


async def test_half_a_surrogate_pair_is_replaced(taps, ingest):
    tap = taps.start(ingest.target)
    with begin(tap, prompt="a\ud800", parameters='"\udfff"', metadata={"k\ud800": "v\ud800"}) as recording:
        recording.chunk("b\ud800", [1])
        recording.end("OK", message="\ud800")
    [record] = await recorded(tap, ingest)
    assert (record.prompt, record.parameters, record.text, record.message) == ("a?", '"?"', "b?", "?")
    assert dict(record.metadata) == {"k?": "v?"}


@pytest.mark.parametrize("mode", Mode)
async def test_each_mode_keeps_its_parts(taps, ingest, mode):
    tap = taps.start(ingest.target, PayloadRules(models={"m": mode}))
    tensor = [RecordedTensor("x", "INT8", [1], b"\1")]
    with begin(tap, prompt="question", parameters="{}", inputs=tensor) as recording:
        assert await recording.flushed()
        recording.chunk("answer", [1], outputs=tensor)
        recording.end("OK", finish_reason="stop", outputs=tensor, usage=Usage(prompt_tokens=1))
    records = await recorded(tap, ingest)
    assert len(records) == (mode is not Mode.OFF)
    for record in records:
        assert [bool(part) for part in (record.prompt, record.parameters, record.inputs)] == [mode.keeps_request] * 3
        assert [bool(part) for part in (record.text, record.chunks, record.outputs)] == [mode.keeps_response] * 3
        assert (record.status, record.finish_reason, record.usage.prompt_tokens) == ("OK", "stop", 1)
        assert record.HasField("ttft_ms")
        assert not record.incomplete


@pytest.mark.parametrize("digest", Digest)
async def test_tensors_are_kept_by_digest_and_their_contents_up_to_a_size(taps, ingest, digest):
    tap = taps.start(ingest.target, PayloadRules(tensor_bytes=4, tensor_digest=digest))
    small = RecordedTensor("small", "INT8", [4], b"abcd")
    large = RecordedTensor("large", "INT8", [1, 5], memoryview(b"abcde"))
    with begin(tap, inputs=[small, large]) as recording:
        recording.chunk("", outputs=[large])
        recording.end("OK", outputs=DeferredTensors(lambda: [small], 4))
    [record] = await recorded(tap, ingest)
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in record.inputs] == [
        ("small", "INT8", [4]), ("large", "INT8", [1, 5]),
    ]  # fmt: skip
    [kept, by_digest] = record.inputs
    assert kept.data == b"abcd"
    assert not by_digest.HasField("data")
    if digest is Digest.OFF:
        assert kept.digest == by_digest.digest == ""
    else:
        assert by_digest.digest == f"{digest}:{getattr(hashlib, digest)(b'abcde').hexdigest()}"
    assert (kept.size, by_digest.size) == (4, 5)
    assert record.chunks[0].outputs[0] == by_digest
    assert record.outputs[0] == kept


# A parsed message whose contents are recorded is kept until they are written.
@pytest.mark.parametrize(("tensor_bytes", "is_serialized"), [(0, False), (64, True)])
async def test_large_contents_wait_for_no_writer(taps, ingest, tensor_bytes, is_serialized):
    request = ModelInferRequest()
    add_input(request, Tensor("large", "UINT8", np.zeros(1 << 20, np.uint8)))
    add_input(request, Tensor("small", "UINT8", np.arange(8, dtype=np.uint8)))
    inputs = request_tensors(request.SerializeToString() if is_serialized else request)
    assert inputs.size > 1 << 20
    tap = tap_of(ingest.target, PayloadRules(tensor_bytes=tensor_bytes), spool=taps.spool)
    with begin(tap, inputs=inputs) as recording:
        recording.chunk("", outputs=inputs)
        recording.end("OK", outputs=inputs)
    assert tap.queued_bytes < 8000
    tap.start()
    [record] = await recorded(tap, ingest)
    await asyncio.to_thread(tap.close)
    for tensors in (record.inputs, record.chunks[0].outputs, record.outputs):
        assert [(t.name, list(t.shape), t.size, t.data) for t in tensors] == [
            ("large", [1 << 20], 1 << 20, b""),
            ("small", [8], 8, bytes(range(8)) if tensor_bytes else b""),
        ]
    assert not record.incomplete


class Secrets:
    """A rule that removes the word from prompts and answers, wherever chunks divide it."""

    redacts_answers = True

    def redact(self, record):
        record.prompt = record.prompt.replace("secret", "-")
        text = "".join(chunk.text for chunk in record.chunks)
        if "secret" in text:
            record.chunks[0].text = text.replace("secret", "-")
            for chunk in record.chunks[1:]:
                chunk.ClearField("text")
                chunk.ClearField("token_ids")


async def test_redacted_text_never_reaches_the_disk(taps, ingest):
    rules = PayloadRules(redactions=[Secrets()])
    tap = taps.start(rules=rules)
    with begin(tap, prompt="my secret") as recording:
        for token, text in enumerate(["the sec", "ret", " word"]):
            recording.chunk(text, [token])
        await until(lambda: tap.queued_bytes == 0)
        recording.end("OK")
    unfinished = begin(tap)
    unfinished.chunk("sec", [1])
    await until(lambda: tap.queued_bytes == 0)
    written = b"".join(path.read_bytes() for path in segments(taps.spool))
    assert b"sec" not in written
    await taps.close(tap)
    assert await taps.start(ingest.target).drain(30)
    [record, cut_off] = ingest.records
    assert (record.prompt, record.text) == ("my -", "the - word")
    assert [chunk.text for chunk in record.chunks] == ["the - word", "", ""]
    assert record.HasField("ttft_ms")
    assert (cut_off.status, cut_off.text, len(cut_off.chunks)) == ("ABORTED", "", 0)


async def test_rules_that_fail_keep_a_part_off_the_disk(taps, ingest):
    class Broken:
        redacts_answers = True

        def redact(self, record):
            if record.chunks or record.prompt == "bad":
                raise RuntimeError("broken")

    tap = taps.start(ingest.target, PayloadRules(redactions=[Broken()]))
    with begin(tap, prompt="bad"):
        pass
    with begin(tap, "second") as recording:
        recording.chunk("text", [1])
        recording.end("OK")
    [record] = await recorded(tap, ingest)
    assert (record.request_id, record.text, record.status, record.incomplete) == ("second", "", "UNKNOWN", True)
    assert tap.dropped == {FAILED: 2}


async def test_answers_that_wait_for_the_rules_are_bounded(taps, ingest):
    tap = taps.start(ingest.target, PayloadRules(redactions=[Secrets()]), memory=10_000)
    with begin(tap) as recording:
        for _ in range(50):
            await until(lambda: tap.queued_bytes < 5_000)
            recording.chunk("x" * 100, [1])
        await until(lambda: tap.queued_bytes == 0)
        recording.end("OK")
    [record] = await recorded(tap, ingest)
    assert record.incomplete
    assert 0 < len(record.text) < 5_000
    assert len(record.chunks) == 50


async def test_records_beyond_its_memory_are_dropped_and_counted(taps, ingest):
    tap = tap_of(ingest.target, spool=taps.spool, memory=10_000)
    recordings = [begin(tap, f"r{number}", prompt="x" * 600) for number in range(20)]
    assert 0 < tap.queued_bytes <= 10_000
    dropped = tap.dropped[MEMORY]
    assert 0 < dropped < 20
    recordings[0].chunk("x" * 10_000, [1])
    for recording in recordings:
        recording.end("OK")
    assert tap.dropped == {MEMORY: dropped + 1}
    tap.start()
    records = await recorded(tap, ingest)
    await asyncio.to_thread(tap.close)
    assert [record.request_id for record in records] == [f"r{number}" for number in range(20 - dropped)]
    assert [record.incomplete for record in records] == [True] + [False] * (19 - dropped)
    assert records[0].HasField("ttft_ms")
    assert tap.queued_bytes == 0


async def test_drops_of_a_full_disk_are_counted_even_if_the_process_dies_before_the_end_of_the_answer(
    taps, ingest, monkeypatch
):
    tap = taps.start(away())
    recording = begin(tap)
    recording.chunk("a", [1])
    await until(lambda: tap.queued_bytes == 0)
    with monkeypatch.context() as patch:
        full(tap, patch)
        recording.chunk("b", [2])
        await until(lambda: tap.dropped[DISK] == 1)
    recording.chunk("c", [3])
    await until(lambda: tap.queued_bytes == 0)
    await taps.close(tap)
    assert await taps.start(ingest.target).drain(30)
    [record] = ingest.records
    assert (record.status, record.text, record.incomplete) == ("ABORTED", "ac", True)


async def test_a_record_matters_more_than_its_tensors(taps, ingest):
    tap = taps.start(ingest.target, PayloadRules(tensor_digest=Digest.BLAKE2B), memory=10_000)
    with begin(tap, inputs=[RecordedTensor("x", "INT8", [20_000], bytes(20_000))]) as recording:
        recording.end("OK", outputs=DeferredTensors(list, 20_000))
    [record] = await recorded(tap, ingest)
    assert (record.status, len(record.inputs), record.incomplete) == ("OK", 0, True)
    assert tap.dropped == {MEMORY: 2}


async def test_a_record_beyond_the_message_limit_loses_its_tokens_then_its_chunks(taps, ingest):
    tap = taps.start(ingest.target, memory=1 << 30)
    for size in (30, 40):
        with begin(tap, str(size)) as recording:
            for _ in range(4):
                recording.chunk("x" * (size << 18), range(500_000))
            recording.end("OK")
    records = await recorded(tap, ingest)
    assert all(record.incomplete for record in records)
    assert [len(record.text) for record in records] == [30 << 20, 40 << 20]
    assert [len(record.chunks) for record in records] == [4, 0]
    assert not records[0].chunks[0].token_ids


async def test_a_record_too_large_for_any_message_is_dropped_and_not_sent_for_ever(taps, ingest):
    tap = taps.start(ingest.target, memory=1 << 30)
    begin(tap, prompt="x" * (64 << 20)).end("OK")
    begin(tap, "next").end("OK")
    assert [record.request_id for record in await recorded(tap, ingest)] == ["next"]
    assert tap.dropped == {TOO_LARGE: 1}


async def test_the_number_of_lost_records_is_stated_once_records_are_whole_again(taps, caplog, monkeypatch):
    monkeypatch.setattr(drops, "_WHOLE_AFTER_S", 0.1)
    with small_disk(taps.spool.parent / "disk", megabytes=6) as disk, caplog.at_level(logging.WARNING):
        tap = tap_of("127.0.0.1:1", spool=disk.path / "spool")
        tap.start()
        for before in range(2):
            await until(lambda: tap.queued_bytes == 0)
            disk.fill()
            with begin(tap, "cut", prompt="x" * 100_000):
                for number in range(40):
                    begin(tap, f"r{number}", prompt="x" * 100_000).end("OK")
                await until(lambda: tap.queued_bytes == 0)
                disk.empty()
            assert sum(tap.dropped.values()) >= 20 * (before + 1)  # The segments at hand take some.

            def recorded_again(before=before):
                begin(tap, "after").end("OK")
                return sum("whole again" in record.getMessage() for record in caplog.records) > before

            await until(recorded_again)
        await tap.stop(0.1)
    texts = [record.getMessage() for record in caplog.records]
    first, again, second, at_last = [text for text in texts if "in whole or part" in text][:4]
    assert first == second == "payload records lost in whole or part: disk (1 so far)"
    stated = [
        int(text.removeprefix("payload records are whole again: ").removesuffix(" were lost in whole or part"))
        for text in (again, at_last)
    ]
    assert sum(stated) == sum(tap.dropped.values())


async def test_a_tap_without_a_spool_serves_and_keeps_records_until_there_is_room(taps, ingest, monkeypatch, caplog):
    monkeypatch.setattr(tap_module, "_OPEN_AGAIN_S", 0.05)
    monkeypatch.setattr(recording_module, "_BEGIN_WAIT_S", 600)  # Nothing waits for the disk.
    with small_disk(taps.spool.parent / "disk", inodes=30) as disk:
        disk.fill("inodes")
        tap = tap_of(ingest.target, spool=disk.path / "spool")
        tap.start()
        with begin(tap, "kept") as recording:
            assert not await recording.flushed()
            recording.chunk("text", [1])
            recording.end("OK")
        await asyncio.sleep(0.2)
        assert ingest.records == []
        disk.empty()
        await until(lambda: ingest.records)
        assert [(record.request_id, record.text, record.incomplete) for record in ingest.records] == [
            ("kept", "text", False)
        ]
        await tap.stop(1)
    assert any("records wait in memory meanwhile" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"rules": REDACTING}])
async def test_every_begin_is_on_disk_before_its_answer_on_either_thread(taps, options):
    tap = taps.start(**options)

    async def caller(name):
        for number in range(20):
            recording = begin(tap, f"{name}-{number}", prompt="x" * 5000)
            assert await recording.flushed()
            assert await recording.flushed(), "asking again is free"
            assert any(recording.record_id.encode() in path.read_bytes() for path in segments(taps.spool))
            recording.end("OK")

    await asyncio.gather(*(caller(name) for name in range(10)))
    await until(lambda: tap.queued_bytes == 0)
    assert tap.spooled == 200


@pytest.mark.parametrize("rules", [None, REDACTING])
async def test_a_begin_that_cannot_be_written_delays_no_request(taps, ingest, monkeypatch, rules):
    tap = taps.start(ingest.target, rules)
    with monkeypatch.context() as patch:
        full(tap, patch)
        lost = [begin(tap) for _ in range(3)]
        assert [await recording.flushed() for recording in lost] == [True] * 3
        await until(lambda: tap.queued_bytes == 0)
    assert tap.dropped == {DISK: 3}
    for recording in lost:
        recording.chunk("x", [1])
        recording.end("OK")
    with begin(tap, "after") as recording:
        await recording.flushed()
    assert {record.request_id for record in await recorded(tap, ingest)} == {"after"}


async def test_a_hanging_disk_delays_one_request_for_a_second_and_the_next_not_at_all(taps, monkeypatch):
    answers = threading.Event()
    allocate = payload_outbox.os.posix_fallocate

    def hanging(*arguments):
        answers.wait()
        allocate(*arguments)

    tap = taps.start()
    await until(lambda: len(tap._boxes[0]._spares) == 2)
    monkeypatch.setattr(payload_outbox.os, "posix_fallocate", hanging)
    try:
        large = {"prompt": "x" * (3 << 20)}
        assert not await begin(tap, **large).flushed()
        later = begin(tap, **large)
        assert not await later.flushed()
        later.chunk("x", [1])
        later.end("OK")
    finally:
        answers.set()
    await until(later.flushed)
    assert await begin(tap).flushed()


async def test_a_tap_that_is_not_started_or_closed_records_nothing_and_affects_no_request(taps):
    tap = tap_of(away(), spool=taps.spool)
    with begin(tap) as recording:
        assert not await recording.flushed()
        recording.chunk("x", [1])
    assert not await tap.drain(0)
    tap = taps.start()
    await taps.close(tap)
    with begin(tap) as recording:
        await recording.flushed()
        recording.chunk("x", [1])


@given(st.lists(st.integers(0, 2**48 - 2), min_size=1))
def test_record_ids_grow_for_any_clock(clock):
    value, ids = 0, []
    for now_ms in clock:
        value = next_id(now_ms, value)
        ids.append(as_uuid7(value))
    assert all(made.version == 7 and made.variant == uuid.RFC_4122 for made in ids)
    assert [str(made) for made in ids] == sorted({str(made) for made in ids})
    assert ids[0].int >> 80 == clock[0]


def test_a_record_id_has_the_layout_of_the_rfc():
    # RFC 9562, appendix A.6.
    value = 0x017F22E279B0 << 74 | 0xCC3 << 62 | 0x18C4DC0C0C07398F
    assert str(as_uuid7(value)) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"
