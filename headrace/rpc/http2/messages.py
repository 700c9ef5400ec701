"""gRPC's messages in the body of an HTTP/2 stream: each has a prefix, whether it is compressed and its length.

Source: gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from h2.exceptions import ProtocolError

from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES

_PREFIX = struct.Struct(">BL")


def with_prefix(message: bytes) -> bytes:
    """The message as it is sent."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._received = bytearray()  # The beginning of a message.

    @property
    def is_between(self) -> bool:
        """Whether no message has begun."""
        return not self._received

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that are whole now; raises h2's ProtocolError for one that is compressed or too large."""
        received = self._received
        received += data
        at = 0
        try:
            while len(received) - at >= _PREFIX.size:
                is_compressed, size = _PREFIX.unpack_from(received, at)
                if is_compressed or size > MAX_MESSAGE_BYTES:
                    raise ProtocolError("a message is compressed" if is_compressed else f"a message has {size} bytes")
                start = at + _PREFIX.size
                if len(received) - start < size:
                    break
                at = start + size
                yield bytes(received[start:at])
        finally:
            del received[:at]
