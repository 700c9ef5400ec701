"""Refused requests fill neither the spool nor the log; answered ones are recorded whole, at any length."""

import pytest

from headrace.errors import InvalidRequestError
from headrace.payload.parts import RecordedTensor
from headrace.payload.records import KEPT_CHARACTERS
from headrace.payload.redaction import Redaction
from headrace.payload.rules import PayloadRules
from tests.support.payload_ingest import begin, segments
from tests.waiting import HANG_S

LONG = "once upon a time " * 20_000
LONG_PARAMETERS = '{"stop": ["' + LONG + '"]}'


async def recorded(tap, ingest):
    assert await tap.drain(HANG_S)
    return ingest.records


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "CANCELLED"])
async def test_the_log_keeps_the_beginning_of_a_refused_request(taps, ingest, status):
    tap = taps.start(ingest.target)
    begin(tap, prompt=LONG, parameters=LONG_PARAMETERS, model="m" * 5000).end(status, "x" * 50_000, "transformer")
    [record] = await recorded(tap, ingest)
    assert record.prompt == LONG[:KEPT_CHARACTERS]
    assert record.parameters == LONG_PARAMETERS[:KEPT_CHARACTERS]
    assert record.message == "x" * KEPT_CHARACTERS
    assert (record.status, record.incomplete) == (status, True)
    assert record.ByteSize() < 8000


async def test_refused_requests_take_little_of_the_spool(taps):
    tap = taps.start()
    for _ in range(20):
        begin(tap, prompt=LONG, parameters=LONG_PARAMETERS).end("INVALID_ARGUMENT", "no")
    assert not await tap.drain(0.5)
    assert 0 < tap.spooled_bytes < 20 * 3 * KEPT_CHARACTERS


async def test_a_short_refused_request_is_recorded_whole(taps, ingest):
    tap = taps.start(ingest.target)
    begin(tap, prompt="p" * KEPT_CHARACTERS, parameters="{}").end("INVALID_ARGUMENT", "no")
    [record] = await recorded(tap, ingest)
    assert (record.prompt, record.parameters, record.incomplete) == ("p" * KEPT_CHARACTERS, "{}", False)


@pytest.mark.parametrize("status", ["OK", "CANCELLED"])
async def test_a_long_answered_request_is_recorded_whole(taps, ingest, status):
    tap = taps.start(ingest.target)
    recording = begin(tap, prompt=LONG, parameters=LONG_PARAMETERS)
    recording.chunk("Once", [1])
    assert await recording.flushed()
    recording.end(status)
    [record] = await recorded(tap, ingest)
    assert (record.prompt, record.parameters) == (LONG, LONG_PARAMETERS)
    assert (record.text, record.status, record.incomplete) == ("Once", status, False)


@pytest.mark.parametrize("status", ["OK", "INTERNAL"])
async def test_a_long_request_whose_begin_was_not_awaited_is_recorded_whole(taps, ingest, status):
    tap = taps.start(ingest.target)
    begin(tap, prompt=LONG, parameters=LONG_PARAMETERS).end(status, text="whole" if status == "OK" else None)
    [record] = await recorded(tap, ingest)
    assert (record.prompt, record.parameters, record.incomplete) == (LONG, LONG_PARAMETERS, False)


async def test_all_of_a_long_request_is_on_disk_before_the_first_chunk_leaves(taps, ingest):
    tap = taps.start()
    recording = begin(tap, prompt=LONG)
    assert await recording.flushed()
    assert LONG.encode() in segments(taps.spool)[0].read_bytes()
    await taps.close(tap)
    tap = taps.start(ingest.target)  # Like the next process after a kill of the first.
    await ingest.until(lambda: ingest.records)
    [record] = ingest.records
    assert (record.prompt, record.status) == (LONG, "ABORTED")


async def test_rules_see_matches_across_the_cut(taps, ingest):
    secret = "4000123412341234"
    tap = taps.start(ingest.target, PayloadRules(redactions=[Redaction(None, "[0-9]{16}")]))
    begin(tap, prompt="x" * (KEPT_CHARACTERS - 8) + secret + LONG).end("INVALID_ARGUMENT", "no")
    answered = begin(tap, prompt="x" + secret + LONG)
    await answered.flushed()
    answered.end("OK", text="yes")
    assert not any(b"4000" in path.read_bytes() for path in segments(taps.spool))
    records = await recorded(tap, ingest)
    assert len(records) == 2
    assert not any("4000" in record.prompt for record in records)
    assert records[-1].prompt == "x[redacted]" + LONG


async def test_a_few_names_of_a_refused_request_s_tensors_are_kept(taps, ingest):
    tap = taps.start(ingest.target, PayloadRules(tensor_bytes=1 << 20))
    inputs = [RecordedTensor("n" * 5000, "INT8", [1] * 1000, bytes(1000)) for _ in range(100)]
    with pytest.raises(InvalidRequestError), begin(tap, inputs=inputs):
        raise InvalidRequestError("no")
    [record] = await recorded(tap, ingest)
    assert record.inputs
    assert record.ByteSize() < 16_000
    assert record.incomplete
