"""Begins of records that wait for their ends: a record whose request is answered at once becomes one frame.

A begin waits for `PENDING_S` seconds at most, and not once an answer waits for it. Belongs to the writer thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.payload.parts import BeginPart, InputsPart, is_long

PENDING_S = 0.03


@dataclass
class Pending:
    """A begin, and the tensors of its request."""

    begin: BeginPart
    inputs: list[InputsPart] = field(default_factory=list)

    @property
    def cost(self) -> int:
        return self.begin.cost + sum(part.cost for part in self.inputs)


class PendingBegins:
    """See the module; in order of arrival."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Pending] = {}

    def add(self, part: BeginPart) -> bool:
        """Keeps a begin and returns True; not of a long request, which is written whole only once its answer begins."""
        if is_long(part.fields):
            return False
        self._pending[part.record_id] = Pending(part)
        return True

    def add_inputs(self, part: InputsPart) -> bool:
        """Keeps the tensors of a request, if its begin is kept; returns whether it is."""
        pending = self._pending.get(part.record_id)
        if pending is None:
            return False
        pending.inputs.append(part)
        return True

    def take(self, record_id: bytes) -> Pending | None:
        """Removes and returns the begin of a record, if it is kept."""
        return self._pending.pop(record_id, None)

    def take_due(self, now: float) -> list[Pending]:
        """Removes and returns the begins that are to be written now."""
        due = [one for one in self._pending.values() if one.begin.is_awaited() or now - one.begin.arrived >= PENDING_S]
        for one in due:
            del self._pending[one.begin.record_id]
        return due

    def __len__(self) -> int:
        return len(self._pending)
