"""One call of `PayloadIngest/Append` and its two threads: gRPC's own, which sends, and one that reads acknowledgements.

`send` and `close` belong to the owner's thread; the attributes are written by the reading thread alone.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from millrace_protos.millrace_pb2 import AppendResponse

AppendCall: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, AppendResponse]"

_JOIN_S = 0.5


class OpenCall:
    """A call that has begun; `changed` is set with each acknowledgement, and at its end."""

    def __init__(self, append: AppendCall, changed: threading.Event) -> None:
        self.acknowledged = 0
        self.ended: str | None = None  # Why it is over, and with which status; it is set last.
        self.code: grpc.StatusCode | None = None
        self._changed = changed
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()  # At most what may be unacknowledged.
        self._call = append(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, name="payload-acks", daemon=True)
        self._thread.start()

    def send(self, request: bytes) -> None:
        """Hands a request to gRPC's own thread."""
        self._requests.put(request)

    def close(self) -> None:
        """Ends the call and both threads."""
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(_JOIN_S)

    def _read(self) -> None:
        try:
            for response in self._call:
                self.acknowledged = response.sequence
                self._changed.set()
            self.ended = "it ended the call"
        except grpc.RpcError as error:
            self.code = error.code()
            self.ended = f"{self.code.name}: {error.details()}"
        self._changed.set()
