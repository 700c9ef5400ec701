"""One call of `PayloadIngest/Append`. gRPC's own thread sends; a second thread reads the acknowledgements.

Only the owner's thread calls `send` and `close`; only the reading thread writes the attributes.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TypeAlias

import grpc

from headrace_protos.headrace_pb2 import AppendResponse

AppendCall: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, AppendResponse]"

_JOIN_S = 0.5


class OpenCall:
    """A call that has begun; `changed` is set at each acknowledgement and at the end of the call."""

    def __init__(self, append: AppendCall, changed: threading.Event) -> None:
        self.acknowledged = 0  # The highest acknowledged sequence.
        self.ended: str | None = None  # Why the call ended, with its status; set after `code`.
        self.code: grpc.StatusCode | None = None
        self._changed = changed
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()  # Bounded by the limit of unacknowledged records.
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
