"""Counts the parts of payload records that are dropped, by reason, and warns at most once a minute for each reason.

When records are whole again a line states how many were lost. For any thread.
"""

import logging
import threading
import time
from collections import Counter

logger = logging.getLogger(__name__)

# Why a part of a record was dropped; where the part is the begin, the whole record is.
FULL = "full"  # The spool has reached its maximum size.
DISK = "disk"  # The part could not be written.
MEMORY = "memory"  # The parts that wait for the disk have reached the maximum memory.
FAILED = "failed"  # The part could not be encoded.
TOO_LARGE = "too_large"  # The record does not fit into a message.
DAMAGED = "damaged"  # The spool could not be read back.
REFUSED = "refused"  # The logger refused the record at every retry.
REASONS = (FULL, DISK, MEMORY, FAILED, TOO_LARGE, DAMAGED, REFUSED)

_WARN_EVERY_S = 60.0
_WHOLE_AFTER_S = 3.0


class Drops:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._next_warning: dict[str, float] = {}
        self._lost = 0  # Records, in whole or part, since records were last whole.
        self._lost_at = 0.0  # When the last one was.
        self._lock = threading.Lock()

    def so_far(self) -> dict[str, int]:
        """How many parts were dropped, for every reason."""
        with self._lock:
            return {reason: self.counts[reason] for reason in REASONS}

    def count(self, reason: str, *, of_another: bool = True, exc_info: bool = False) -> None:
        """Counts a dropped part and warns, unless there was a warning of this reason within the last minute.

        `of_another`: of a record that has lost nothing so far.
        """
        with self._lock:
            self.counts[reason] += 1
            self._lost += of_another
            lost, self._lost_at = self._lost, time.monotonic()
        self.warn(reason, "payload records lost in whole or part: %s (%d so far)", reason, lost, exc_info=exc_info)

    def whole(self, at_end: bool = False) -> None:
        """Notes that records are written whole; states the losses once there were none for some seconds, or at the end.

        The next loss is a new beginning, with a warning.
        """
        if not self._lost:  # Each record asks.
            return
        with self._lock:
            if not self._lost or (not at_end and time.monotonic() - self._lost_at < _WHOLE_AFTER_S):
                return
            lost, self._lost = self._lost, 0
            for reason in REASONS:
                self._next_warning.pop(reason, None)
        what = "the process ends" if at_end else "payload records are whole again"
        logger.warning("%s: %d were lost in whole or part", what, lost)

    def warn(self, topic: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        """Warns, unless there was a warning of the topic within the last minute."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_warning.get(topic, now):
                return
            self._next_warning[topic] = now + _WARN_EVERY_S
        logger.warning(message, *arguments, exc_info=exc_info)
