"""Merges the frames of a spool, in order, to records; see headrace_protos/spool.proto. Pure: no I/O, no clock.

An open record is kept as its concatenated serialized parts, because protobuf merges concatenated messages. It grows up
to the size of a message: further chunks are left out.

If a request was refused, or its caller cancelled it, before any part of its answer, the record keeps the first
`KEPT_CHARACTERS` of each text: refused requests must not fill the log.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf.message import DecodeError

from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_protos.spool_pb2 import Frame

# Appended to a frame, with which protobuf merges it.
INCOMPLETE = Frame(part=[PayloadRecord(incomplete=True).SerializeToString()]).SerializeToString()

KEPT_CHARACTERS = 2048
_KEPT_TENSORS = 16
_KEPT_NAME = 256  # Characters of names: of the model, of tensors.
# Records of requests that fail with another status keep everything, for the analysis of the failure.
_CALLERS_OWN = frozenset(
    {
        "ALREADY_EXISTS",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
    }
)

# An aborted record has no END frame and so no number. This number is above all frames', and the same at each reading.
_ABORTED = 1 << 62
_JOURNALED = 1 << 61  # Above all frames' numbers too: instead of the number that a begin in the journal does not have.
_NEWEST = 1024  # More than the journal has.


class EndedRecord(NamedTuple):
    """A whole record, serialized; `began` is the number of its BEGIN frame."""

    sequence: int
    began: int
    data: bytes

    @property
    def record(self) -> PayloadRecord:
        return PayloadRecord.FromString(self.data)


class _OpenRecord:
    def __init__(self, began: int, parts: bytes) -> None:
        self.began = began
        self.parts = bytearray(parts)
        self.incomplete = False


class Merger:
    """Takes one source's frames; `max_bytes` is the maximum size of a record."""

    def __init__(self, max_bytes: int, hop: str) -> None:
        self.open_bytes = 0
        self._max_bytes = max_bytes
        self._hop = hop
        self._open: dict[bytes, _OpenRecord] = {}  # In the order of their begins.
        self._next = 1  # The number of the frame that follows.
        self._newest: deque[bytes] = deque(maxlen=_NEWEST)  # The last records that began.

    @property
    def first_began(self) -> int | None:
        """The number of the first BEGIN whose record is open."""
        return next((record.began for record in self._open.values()), None)

    def take(self, number: int, payload: bytes) -> EndedRecord | None:
        """The record that the frame ends, if it ends one; after missing frames all open records are incomplete."""
        if number != self._next:
            for record in self._open.values():
                record.incomplete = True
        self._next = number + 1
        try:
            frame = Frame.FromString(payload)
        except DecodeError:
            return None  # Perhaps of a later release.
        part = b"".join(frame.part)
        if frame.kind == Frame.WHOLE:
            self._newest.append(frame.record_id)
            return EndedRecord(number, number, part)
        if frame.kind == Frame.BEGIN:
            self._forget(frame.record_id)
            self._begin(number, frame.record_id, part)
        elif (opened := self._open.get(frame.record_id)) is None:
            return None  # Its begin was shipped and deleted, or damaged.
        elif frame.kind == Frame.CHUNK:
            self._extend(opened, part)
        elif frame.kind == Frame.END:
            self._forget(frame.record_id)
            whole = _ended(opened, part, frame.replaces_chunks)
            return EndedRecord(number, opened.began, whole.SerializeToString())
        return None

    def take_journal(self, payloads: Iterable[bytes]) -> None:
        """Opens the records of a spool's journal, after its frames, except those whose begins are frames too."""
        begun = {*self._newest, *self._open}
        for number, payload in enumerate(payloads, _JOURNALED):
            with contextlib.suppress(DecodeError):  # As in `take`.
                frame = Frame.FromString(payload)
                if frame.record_id not in begun:
                    self._begin(number, frame.record_id, b"".join(frame.part))

    def abort(self) -> EndedRecord | None:
        """Ends the first open record, whose process has ended; None if no record is open."""
        for record_id, opened in self._open.items():
            self._forget(record_id)
            message = "the service ended before the answer did"
            end = PayloadRecord(status="ABORTED", message=message, failed_hop=self._hop)
            record = _ended(opened, end.SerializeToString())
            if record.chunks:
                record.duration_ms = record.chunks[-1].offset_ms
            return EndedRecord(_ABORTED + opened.began, opened.began, record.SerializeToString())
        return None

    def snapshots(self, before: int) -> list[bytes]:
        """The open records that began before a frame, each as one BEGIN frame with all its parts so far."""
        frames = []
        for record_id, opened in self._open.items():
            if opened.began >= before:
                break
            payload = Frame(record_id=record_id, kind=Frame.BEGIN, part=[bytes(opened.parts)]).SerializeToString()
            frames.append(payload + INCOMPLETE if opened.incomplete else payload)
        return frames

    def _begin(self, number: int, record_id: bytes, part: bytes) -> None:
        self._newest.append(record_id)
        self._open[record_id] = _OpenRecord(number, part)
        self.open_bytes += len(part)

    def _extend(self, opened: _OpenRecord, part: bytes) -> None:
        if len(opened.parts) + len(part) > self._max_bytes:
            opened.incomplete = True
        else:
            opened.parts += part
            self.open_bytes += len(part)

    def _forget(self, record_id: bytes) -> None:
        opened = self._open.pop(record_id, None)
        if opened is not None:
            self.open_bytes -= len(opened.parts)


def ended_at(record: PayloadRecord) -> float:
    """When the record ended, in seconds of the wall clock of the process that recorded it."""
    return record.time.seconds + record.time.nanos / 1e9 + record.duration_ms / 1000


def is_callers_own(status: str) -> bool:
    """Whether a request with this status, and without an answer, is shortened in the record."""
    return status in _CALLERS_OWN


def fit(record: PayloadRecord, max_bytes: int) -> bool:
    """Shrinks a record to the size of a message, the least important fields first; returns whether it fits."""
    for leave_out in (_leave_out_tokens, _leave_out_chunks, _leave_out_tensors):
        if record.ByteSize() <= max_bytes:
            break
        leave_out(record)
        record.incomplete = True
    return record.ByteSize() <= max_bytes


def _ended(opened: _OpenRecord, end: bytes, replaces_chunks: bool = False) -> PayloadRecord:
    record = PayloadRecord.FromString(bytes(opened.parts))
    if replaces_chunks:
        record.ClearField("chunks")
    record.MergeFromString(end)
    record.incomplete |= opened.incomplete
    if not record.text:
        record.text = "".join(chunk.text for chunk in record.chunks)
    shorten_refused(record)
    return record


def shorten_refused(record: PayloadRecord) -> None:
    """Shortens the record of a refused request."""
    if was_refused(record):
        _keep_little(record)


def was_refused(record: PayloadRecord) -> bool:
    """Whether the request ended without an answer because of its caller or for lack of capacity."""
    has_answer = record.chunks or record.text or record.outputs or record.HasField("ttft_ms")
    return is_callers_own(record.status) and not has_answer


def _keep_little(record: PayloadRecord) -> None:
    for name, kept in (("prompt", KEPT_CHARACTERS), ("parameters", KEPT_CHARACTERS), ("model", _KEPT_NAME)):
        text = getattr(record, name)
        if len(text) > kept:
            setattr(record, name, text[:kept])
            record.incomplete = True
    if len(record.message) > KEPT_CHARACTERS:
        record.message = record.message[:KEPT_CHARACTERS]
    if len(record.inputs) > _KEPT_TENSORS:
        del record.inputs[_KEPT_TENSORS:]
        record.incomplete = True
    for tensor in record.inputs:
        tensor.ClearField("data")
        if tensor.ByteSize() > 2 * _KEPT_NAME:
            tensor.name, tensor.datatype = tensor.name[:_KEPT_NAME], tensor.datatype[:_KEPT_NAME]
            del tensor.shape[_KEPT_TENSORS:]
            record.incomplete = True


def _leave_out_tokens(record: PayloadRecord) -> None:
    for chunk in record.chunks:
        chunk.ClearField("token_ids")
        chunk.ClearField("logprobs")
    record.ClearField("prompt_ids")


def _leave_out_chunks(record: PayloadRecord) -> None:
    record.ClearField("chunks")


def _leave_out_tensors(record: PayloadRecord) -> None:
    for tensor in (*record.inputs, *record.outputs):
        tensor.ClearField("data")
