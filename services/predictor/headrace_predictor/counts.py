"""Counters that only the model itself can keep, since it was created."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["succeeded", "failed", "cancelled"]

_WEIGHT = 0.1  # The weight of the newest request in the mean duration.


@dataclass
class RequestCounts:
    """Has one owner; times are those of time.monotonic()."""

    steps: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    mean_compute_s: float = 0.1

    @property
    def ended(self) -> int:
        """Requests that have ended, with any outcome; without those that were refused at once."""
        return self.succeeded + self.failed + self.cancelled

    @property
    def retry_after_ms(self) -> int:
        """The estimated duration of one request."""
        return max(1, int(self.mean_compute_s * 1000))

    def add(self, outcome: Outcome, submitted_at: float, started_at: float, ended_at: float) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.queue_ns += int((started_at - submitted_at) * 1e9)
        self.compute_ns += int((ended_at - started_at) * 1e9)
        if outcome == "succeeded":
            self.mean_compute_s += _WEIGHT * (ended_at - started_at - self.mean_compute_s)
