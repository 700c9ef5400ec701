"""Begins of records that wait for their ends, so that a record whose request is answered at once is one frame.

A begin waits no longer than `PENDING_S`, nor once an answer waits for it. Belongs to the writer thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.payload.parts import BeginPart, InputsPart, is_long

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
    """See the module; in the order of their arrival."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Pending] = {}

    def add(self, part: BeginPart) -> bool:
        """Keeps a begin; not that of a long request, which is not written whole before its answer begins."""
        if is_long(part.fields):
            return False
        self._pending[part.record_id] = Pending(part)
        return True

    def add_inputs(self, part: InputsPart) -> bool:
        """Keeps the tensors of a request whose begin is kept."""
        pending = self._pending.get(part.record_id)
        if pending is None:
            return False
        pending.inputs.append(part)
        return True

    def take(self, record_id: bytes) -> Pending | None:
        """That of a record, which is kept no longer."""
        return self._pending.pop(record_id, None)

    def take_due(self, now: float) -> list[Pending]:
        """Those that wait no longer."""
        due = [one for one in self._pending.values() if one.begin.is_awaited() or now - one.begin.arrived >= PENDING_S]
        for one in due:
            del self._pending[one.begin.record_id]
        return due

    def __len__(self) -> int:
        return len(self._pending)
