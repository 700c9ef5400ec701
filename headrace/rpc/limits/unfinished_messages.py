"""How many bytes of incomplete messages this process has received: gRPC buffers them and does not report how many.

The estimate is the bytes that its sockets have received, minus the messages that were read. That includes headers,
frames and bytes of calls that have ended, so the estimate is limited to the growth of the process since it was
smallest; it is 0 if no call waits for a message.

Source: Linux, /proc/self and tcp_info of <linux/tcp.h>. Elsewhere nothing is known, and the estimate is 0.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from contextlib import suppress

_TCP_INFO = 11
_BYTES_RECEIVED = 128  # Offset of tcpi_bytes_received, eight bytes.
_CALL_BYTES = 2048  # Headers and frames of a call and its message, at most.
_LOOK_S = 1.0  # Sockets are looked at so often, and more often while memory grows.
_GROWTH_BYTES = 8 * 1024 * 1024
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UnfinishedMessages:
    """Used by one thread."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._ports: dict[str, int | None] = {}  # Of each TCP socket that is connected; None of any other.
        self._listening: set[int] = set()
        self._received: dict[str, int] = {}  # By each connection that was accepted, at the last look.
        self._read = 0
        self._least = self._resident = 0
        self._looked_at = 0.0
        self._unfinished = 0

    def message_read(self, size: int) -> None:
        """A message of a size has arrived and was read."""
        self._read += size + _CALL_BYTES

    def begin(self) -> None:
        """Starts to count: no message is incomplete now.

        What the sockets have received is not read again within a second, because reading it takes a millisecond; the
        messages that were read since then count as well.
        """
        now = time.monotonic()
        with suppress(OSError):
            self._least = self._resident = resident_bytes()
            if now >= self._looked_at + _LOOK_S:
                self._received, self._read, self._looked_at = self._received_now(), 0, now
        self._unfinished = 0

    def estimate(self) -> int:
        """Estimates the bytes of incomplete messages."""
        try:
            resident, now = resident_bytes(), time.monotonic()
            if resident < self._resident + _GROWTH_BYTES and now < self._looked_at + _LOOK_S:
                self._least = min(self._least, resident)
                self._resident = min(self._resident, resident)
                self._unfinished = min(self._unfinished, resident - self._least)
                return self._unfinished
            self._resident, self._looked_at = resident, now
            before, self._received = self._received, self._received_now()
        except OSError:
            return 0
        arrived = sum(size - before.get(name, 0) for name, size in self._received.items())
        self._least = min(self._least, resident)
        unfinished = max(0, self._unfinished + arrived - self._read)
        self._read = 0
        self._unfinished = min(unfinished, resident - self._least)
        return self._unfinished

    def _received_now(self) -> dict[str, int]:
        """The bytes that each accepted connection has received so far."""
        found: dict[str, int] = {}
        names: dict[str, int] = {}
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{entry}")
                if name.startswith("socket:"):
                    names[name] = int(entry)
        for name in self._ports.keys() - names.keys():
            del self._ports[name]
        for name, descriptor in names.items():
            if name not in self._ports:
                with suppress(OSError):
                    self._ports[name] = self._port_of(descriptor)
        info, size = ctypes.create_string_buffer(256), ctypes.c_uint32()
        for name, descriptor in names.items():
            if self._ports.get(name) in self._listening:
                size.value = len(info)
                failed = self._libc.getsockopt(descriptor, socket.IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(size))
                if not failed and size.value >= _BYTES_RECEIVED + 8:
                    (found[name],) = struct.unpack_from("<Q", info, _BYTES_RECEIVED)
        return found

    def _port_of(self, descriptor: int) -> int | None:
        """The local port of a connection; the port of a listener is remembered."""
        with socket.socket(fileno=os.dup(descriptor)) as each:
            if each.type != socket.SOCK_STREAM or each.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            port: int = each.getsockname()[1]
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._listening.add(port)
                return None
            return port


def resident_bytes() -> int:
    """Resident memory of this process in bytes; raises OSError if it is unknown."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
