"""What a sink is: it turns a record into events and sends one event at a time.

A sink keeps nothing of its own on disk: `SinkRunner` remembers under `name` how far it has come, and brings the same
record again where that is uncertain. So the events of a record must be the same every time, their ids included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace_protos.millrace_pb2 import PayloadRecord


class TryAgainError(Exception):
    """The sink cannot take the event now; `retry_after_s` is how long it asks to be left alone."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The sink will never take this event."""


@dataclass(frozen=True)
class Event:
    """What goes to a sink in one piece."""

    id: str
    headers: Mapping[str, str]
    body: bytes


class Sink(Protocol):
    """Something that takes events."""

    name: str  # Of its cursor, and in the log: another one is another sink. Holds no secret.

    def events(self, record: PayloadRecord) -> Sequence[Event]:
        """The record's events, in the order in which they are sent; called on any thread."""
        ...

    async def send(self, event: Event) -> None:
        """Returns when the sink has taken the event, within a bounded time; raises TryAgainError or RefusedError."""
        ...

    async def close(self) -> None:
        """Ends the connections."""
        ...
