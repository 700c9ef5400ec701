"""The frames of an outbox.

A frame is a header (CRC-32 of what follows it, length of the contents, kind, number, id of the record) and contents: a
serialized PayloadRecord, or a part of one; protobuf merges concatenated parts. Frames are numbered from 1. Whole
records are sent to the logger. Begins and more parts of records that have not ended are read only if their process
dies. A damaged frame is skipped by its length; if two in a row are damaged, the rest of the segment is discarded.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

BEGIN, MORE, WHOLE = 1, 2, 3  # Kinds of frames.

_CRC, _REST = struct.Struct("<I"), struct.Struct("<IBQ16s")
HEADER_BYTES = _CRC.size + _REST.size


class Frame(NamedTuple):
    kind: int
    number: int
    record_id: bytes
    contents: bytes


def header(kind: int, number: int, record_id: bytes, contents: bytes) -> bytes:
    """What precedes these contents."""
    rest = _REST.pack(len(contents), kind, number, record_id)
    return _CRC.pack(zlib.crc32(contents, zlib.crc32(rest))) + rest


def frames(data: bytes, at: int, end: int, is_last: bool = False) -> Iterator[tuple[int, Frame | None]]:
    """The frames between two offsets, each with the offset that follows it; None for damage.

    `is_last`: the process may have died before the last frame had its header, which is no damage.
    """
    was_bad = False
    while end - at >= HEADER_BYTES:
        length, kind, number, record_id = _REST.unpack_from(data, at + _CRC.size)
        if not kind and not length:
            if not is_last and not _is_zero(data, at, end):
                yield end, None
            return
        following = at + HEADER_BYTES + length
        checked = data[at + _CRC.size : following] if following <= end else b""
        if checked and zlib.crc32(checked) == _CRC.unpack_from(data, at)[0]:
            yield following, Frame(kind, number, record_id, checked[_REST.size :])
            was_bad = False
        elif was_bad or _is_zero(data, following, following + HEADER_BYTES):
            yield end, None
            return
        else:
            yield following, None
            was_bad = True
        at = following


def _is_zero(data: bytes, at: int, end: int) -> bool:
    return not data[at:end].strip(b"\0")
