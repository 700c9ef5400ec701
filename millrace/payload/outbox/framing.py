"""From parts of records in a queue to frames for the disk, a slice of them at a time.

Belongs to the writer thread. A record whose begin and end are in one slice, and nothing but its request's tensors
between, is one frame.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace.payload.drops import FAILED, Drops
from millrace.payload.outbox.frames import FrameEncoder, OpenRecord
from millrace.payload.outbox.pending import Pending, PendingBegins
from millrace.payload.parts import BeginPart, ChunkPart, EndPart, InputsPart, LaterPart, PartQueue, RequestPart

_SLICE = 64  # Parts: well below a millisecond.
_HEAVY_BYTES = 1 << 20


class Framed(NamedTuple):
    """A frame on its way to the disk, and the part that it was made of."""

    payload: bytes
    part: BeginPart | LaterPart  # The first, where several are written together.
    record: OpenRecord
    parts: int = 1
    ends_record: bool = False


class Framing:
    """See the module. `settle` gets parts of which nothing is written, for which requests may wait."""

    def __init__(
        self,
        queue: PartQueue,
        encoder: FrameEncoder,
        drops: Drops,
        settle: Callable[[Sequence[BeginPart | RequestPart]], bool],
    ) -> None:
        self.cost = 0  # Of the parts in the last slice, of all that is dealt with.
        # Dropped ones too, until their ends come: what still comes of them fills the queue until somebody looks.
        self.open: dict[bytes, OpenRecord] = {}
        self._queue = queue
        self._encoder = encoder
        self._drops = drops
        self._settle = settle
        self._pending = PendingBegins()

    @property
    def requests(self) -> int:
        """Those whose ends have not come."""
        return len(self.open) + len(self._pending)

    def slice(self, is_last: bool, begins_alone: bool = False) -> list[Framed]:
        """The frames of some of what waits; with `is_last` no begin waits for its end.

        `begins_alone`: of what waits, only the begins for which answers wait.
        """
        self.cost = 0
        frames: list[Framed] = []
        chunks: dict[bytes, list[ChunkPart]] = {}  # By record; the order of different records does not matter.
        self._take_begins(frames)
        for _ in range(0 if begins_alone else _SLICE):
            if not self._queue.parts or self.cost >= _HEAVY_BYTES:
                break
            part = self._queue.parts.popleft()
            if part.record_id not in self.open and self._take_with_begin(part, frames):
                continue
            self.cost += part.cost
            if isinstance(part, ChunkPart):
                chunks.setdefault(part.record_id, []).append(part)
                continue
            self._take_chunks(chunks.pop(part.record_id, ()), frames)  # Those before it.
            self._take(part, frames)
        for parts in chunks.values():
            self._take_chunks(parts, frames)
        # The end of a begin that nobody waits for may be among the parts.
        now = -math.inf if begins_alone else math.inf if is_last else time.monotonic()
        for pending in self._pending.take_due(now):
            self._take_begin(pending, frames)
        return frames

    def _take_with_begin(self, part: LaterPart, frames: list[Framed]) -> bool:
        """Takes a part of a record whose begin is not written together with it, or else writes the begin first."""
        self._take_begins(frames)  # It may have been put after `_take_begins` ran.
        if isinstance(part, InputsPart) and self._pending.add_inputs(part):
            return True
        pending = self._pending.take(part.record_id)
        if pending is None:
            return False
        if isinstance(part, EndPart) and self._take_whole(pending, part, frames):
            return True
        self._take_begin(pending, frames)
        return False

    def _take_begins(self, frames: list[Framed]) -> None:
        while self._queue.begins:
            part = self._queue.begins.popleft()
            if not self._pending.add(part):
                self._take_begin(Pending(part), frames)

    def _take_begin(self, pending: Pending, frames: list[Framed]) -> None:
        part = pending.begin
        self.cost += pending.cost
        record = self.open[part.record_id] = OpenRecord(part.fields)
        try:
            frames.append(Framed(self._encoder.begin(part, record), part, record))
        except Exception:
            self._drops.count(FAILED, exc_info=True)
            record.dropped = True
            self._settle([part])
        for inputs in pending.inputs:
            self._take(inputs, frames)

    def _take_whole(self, pending: Pending, end: EndPart, frames: list[Framed]) -> bool:
        """Encodes a record as one frame; where that fails, one part that cannot be encoded must cost no other."""
        begin = pending.begin
        try:
            payload = self._encoder.whole(begin, pending.inputs, end)
        except Exception:
            return False
        self.cost += pending.cost + end.cost
        frames.append(Framed(payload, begin, OpenRecord(begin.fields), ends_record=True))
        return True

    def _take_chunks(self, parts: Sequence[ChunkPart], frames: list[Framed]) -> None:
        """Encodes chunks of one record as one frame; one that cannot be encoded costs none of the others."""
        if len(parts) > 1 and not (record := self.open[parts[0].record_id]).dropped:
            with contextlib.suppress(Exception):  # Of which one, and why, is seen below.
                frames.append(Framed(self._encoder.chunks(parts, record), parts[0], record, len(parts)))
                return
        for part in parts:
            self._take(part, frames)

    def _take(self, part: LaterPart, frames: list[Framed]) -> None:
        record = self.open[part.record_id]
        if not record.dropped:
            try:
                frames.append(Framed(self._encode(part, record), part, record, 1, isinstance(part, EndPart)))
            except Exception:
                self._drops.count(FAILED, exc_info=True)
                record.incomplete = True
                if isinstance(part, EndPart):
                    frames.append(Framed(self._encoder.end_without_contents(part), part, record, 1, True))
        if isinstance(part, RequestPart) and (not frames or frames[-1].part is not part):
            self._settle([part])
        if isinstance(part, EndPart):
            del self.open[part.record_id]
            self._encoder.forget(record)

    def _encode(self, part: LaterPart, record: OpenRecord) -> bytes:
        match part:
            case RequestPart():
                return self._encoder.request(part.record_id, record)
            case InputsPart():
                return self._encoder.inputs(part)
            case ChunkPart():
                return self._encoder.chunks((part,), record)
            case EndPart():
                return self._encoder.end(part, record)
