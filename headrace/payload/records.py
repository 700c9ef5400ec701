"""Payload records for all who write or read them: their ids, what they say, and how those of refused requests shrink.

Records have UUIDs of version 7, which sort in the order of their creation: RFC 9562, section 5.7. Python has
`uuid.uuid7` from 3.14 on.

If a request was refused, or its caller cancelled it, before any part of its answer, the record keeps the first
`KEPT_CHARACTERS` of each text: refused requests must not fill the log.
"""

import re
import secrets
import uuid

from headrace_protos.headrace_pb2 import PayloadRecord

# The id of a replayed request is this and the id of the record.
REPLAY_PREFIX = "replay-"
_REPLAY_ID = re.compile(REPLAY_PREFIX + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

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


def next_id(now_ms: int, previous: int) -> int:
    """A number of 48 bits of Unix milliseconds and 74 random bits, above `previous` even if the clock goes back."""
    return max(now_ms << 74 | secrets.randbits(74), previous + 1)


def as_uuid7(value: int) -> uuid.UUID:
    """The UUID with the 122 bits of `next_id`; it keeps their order."""
    return uuid.UUID(bytes=as_bytes(value))


def as_bytes(value: int) -> bytes:
    """The 16 bytes of `as_uuid7`."""
    time_ms, random_a, random_b = value >> 74, value >> 62 & 0xFFF, value & (1 << 62) - 1
    return (time_ms << 80 | 7 << 76 | random_a << 64 | 0b10 << 62 | random_b).to_bytes(16, "big")


def as_text(uuid_bytes: bytes) -> str:
    """The text that `str` gives for the UUID, at a fifth of its cost."""
    text = uuid_bytes.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def is_replay(request_id: str) -> bool:
    """Whether the request is a replay of a record."""
    return _REPLAY_ID.fullmatch(request_id) is not None


def token_count(record: PayloadRecord) -> int:
    """The number of the answer's tokens on record."""
    return sum(len(chunk.token_ids) for chunk in record.chunks)


def was_generated(record: PayloadRecord) -> bool:
    """Whether an engine was asked to generate text for it: not so for tensors, and what was refused before."""
    return bool(record.sampling or token_count(record)) or record.HasField("engine_ms")


def answer_of(record: PayloadRecord) -> str:
    return record.text or "".join(chunk.text for chunk in record.chunks)


def ended_at(record: PayloadRecord) -> float:
    """When the record ended, in seconds of the wall clock of the process that recorded it."""
    return record.time.seconds + record.time.nanos / 1e9 + record.duration_ms / 1000


def is_callers_own(status: str) -> bool:
    """Whether a request with this status, and without an answer, is shortened in the record."""
    return status in _CALLERS_OWN


def was_refused(record: PayloadRecord) -> bool:
    """Whether the request ended without an answer because of its caller or for lack of capacity."""
    has_answer = record.chunks or record.text or record.outputs or record.HasField("ttft_ms")
    return is_callers_own(record.status) and not has_answer


def shorten_refused(record: PayloadRecord) -> None:
    if not was_refused(record):
        return
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
