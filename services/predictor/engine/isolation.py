"""The one request of a process that may run in isolation.

A request runs in isolation because it may crash its process. Two of them at a time would each be suspected of what the
other does, whatever their models: so a process isolates one request, from its submission until its next token or its
end. Any thread.
"""

from __future__ import annotations

import threading

from millrace.errors import NotReadyError

_RETRY_AFTER_MS = 100


class Isolation:
    """See the module; a holder is whatever the engine knows a request by."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object | None = None

    def acquire(self, holder: object) -> None:
        """Raises NotReadyError while another request has it."""
        with self._lock:
            if self._holder is not None:
                raise NotReadyError("another request runs in isolation here", retry_after_ms=_RETRY_AFTER_MS)
            self._holder = holder

    def release(self, holder: object) -> None:
        """Releases it, if the holder has it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
