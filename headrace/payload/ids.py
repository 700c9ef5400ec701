"""Ids of records, and of the requests that replay them.

Records have UUIDs of version 7, which sort in the order of their creation: RFC 9562, section 5.7. Python has
`uuid.uuid7` from 3.14 on.
"""

from __future__ import annotations

import re
import secrets
import uuid

# The id of a replayed request is this and the id of the record.
REPLAY_PREFIX = "replay-"
_REPLAY_ID = re.compile(REPLAY_PREFIX + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


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
