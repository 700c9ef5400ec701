"""The one request of an engine that may run isolated.

A request runs isolated because it may crash its process, which has one engine. If two of them ran at a time, each would
be suspected of the other's crash: so an engine isolates one request at a time, from its submission until its next token
or its end. Thread-safe.
"""

from __future__ import annotations

import threading

from headrace.errors import NotReadyError

_RETRY_AFTER_MS = 100


class Isolation:
    """See the module; a holder is any object that identifies a request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object | None = None

    def acquire(self, holder: object) -> None:
        """Raises NotReadyError while another request holds it."""
        with self._lock:
            if self._holder is not None:
                raise NotReadyError("another request runs in isolation here", retry_after_ms=_RETRY_AFTER_MS)
            self._holder = holder

    def release(self, holder: object) -> None:
        """Releases it, if `holder` holds it."""
        with self._lock:
            if self._holder is holder:
                self._holder = None
