"""The one request of a process that is still to run alone.

A request runs alone because it may be what kills its process. Two at a time would each be suspected of
what the other does, whatever models they are for: so one process holds one, from its submission until
its next token or its end. Any thread.
"""

from __future__ import annotations

import threading

from millrace.errors import NotReadyError

_RETRY_AFTER_MS = 100


class SoloPlace:
    """See the module; a holder is whatever the engine knows a request by."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object | None = None

    def take(self, holder: object) -> None:
        """Raises NotReadyError where another has it."""
        with self._lock:
            if self._holder is not None:
                raise NotReadyError("another request runs alone here", retry_after_ms=_RETRY_AFTER_MS)
            self._holder = holder

    def leave(self, holder: object) -> None:
        """Gives the place back, if the holder has it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
