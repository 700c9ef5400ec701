"""The interface of a sink: converts a record to events and sends one event at a time.

A sink has no state on disk: `SinkRunner` persists its position under `name`, and sends a record again if its delivery
is uncertain. So the events of a record must be the same every time, including their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace_protos.millrace_pb2 import PayloadRecord


class TryAgainError(Exception):
    """The sink cannot accept the event now; `retry_after_s` is the minimum delay that it asks for."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The sink will never accept this event."""


@dataclass(frozen=True)
class Event:
    """The unit of delivery to a sink."""

    id: str
    headers: Mapping[str, str]
    body: bytes


class Sink(Protocol):
    """A receiver of events."""

    name: str  # Identifies the cursor and appears in the log; another name is another sink. Without secrets.

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """Returns the record's events in the order of sending; called on any thread."""
        ...

    async def send(self, event: Event) -> None:
        """Returns when the sink has accepted the event, within bounded time; raises TryAgainError or RefusedError."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...
