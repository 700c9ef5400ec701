"""Bodies that a client has compressed by `deflate` (zlib's format); the gateway inflates gzip.

A body that would exceed the gateway's limit when inflated is refused before it is inflated.
Source: RFC 9110, section 8.4.1.
"""

from __future__ import annotations

import zlib

from headrace.errors import InvalidRequestError, TooLargeError

CONTENT_ENCODING = "content-encoding"
DEFLATE = "deflate"
MAX_BYTES = 60 * 1024 * 1024  # The gateway's limit of a body.


def inflate(data: bytes) -> tuple[None, bytes]:
    """`inflated` for a process of bodies."""
    return None, inflated(data)


def is_small(data: bytes, max_bytes: int) -> bool:
    """Whether the body that was compressed has so many bytes at most, as far as that can be known."""
    if len(data) > max_bytes:
        return False
    try:
        return len(zlib.decompressobj().decompress(data, max_bytes + 1)) <= max_bytes
    except zlib.error:
        return True


def inflated(data: bytes) -> bytes:
    """The body that was compressed; raises InvalidRequestError, and TooLargeError."""
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not compressed by {DEFLATE}: {error}") from None
    if reader.unconsumed_tail:
        raise TooLargeError(f"the body has more than {MAX_BYTES} bytes")
    if not reader.eof or reader.unused_data:
        raise InvalidRequestError(f"the body is not compressed by {DEFLATE}: it does not end where its data does")
    return body
