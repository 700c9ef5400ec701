"""When an engine that has ended is started again: at once, then with growing delays. Pure except for the clock."""

from __future__ import annotations

import time

_STEADY_S = 30.0  # After a run of this length the next start is immediate.
_AT_ONCE = 3
_FIRST_S = 0.5
_LONGEST_S = 30.0


class Backoff:
    """Counts failed starts and short runs of one model's engine."""

    def __init__(self) -> None:
        self._short_lives = 0
        self._failures = 0
        self._started_at: float | None = None

    def started(self) -> None:
        """The engine serves."""
        self._started_at = time.monotonic()
        self._failures = 0

    def failed(self) -> None:
        """It could not be started."""
        self._failures += 1

    def delay_s(self) -> float:
        """Seconds to wait before the next start."""
        if self._started_at is not None:
            is_steady = time.monotonic() - self._started_at >= _STEADY_S
            self._short_lives = 0 if is_steady else self._short_lives + 1
            self._started_at = None
        doublings = self._failures + max(0, self._short_lives - _AT_ONCE)
        return min(_LONGEST_S, _FIRST_S * 2.0 ** (doublings - 1)) if doublings else 0.0
