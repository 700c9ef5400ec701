"""Turns queued parts of records into frames for the disk, one slice at a time.

Belongs to the writer thread. A record is one frame if its begin still waits when its end comes, with nothing but its
request's tensors between them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.payload.drops import FAILED, Drops
from headrace.payload.outbox.frames import FrameEncoder, OpenRecord
from headrace.payload.outbox.pending import Pending, PendingBegins
from headrace.payload.parts import BeginPart, ChunkPart, EndPart, InputsPart, LaterPart, PartQueue, RequestPart

_SLICE = 64  # Parts: well below a millisecond.
_HEAVY_BYTES = 1 << 20


class Framed(NamedTuple):
    """A frame to be written, and its part."""

    payload: bytes
    part: BeginPart | LaterPart  # The first one, if the frame holds several.
    record: OpenRecord
    parts: int = 1
    ends_record: bool = False


class Framing:
    """See the module. `settle` gets dropped parts for which answers may wait."""

    def __init__(
        self,
        queue: PartQueue,
        encoder: FrameEncoder,
        drops: Drops,
        settle: Callable[[Sequence[BeginPart | RequestPart]], bool],
    ) -> None:
        self.cost = 0  # Of the parts that the last slice took from the queue.
        # Dropped records too, until their ends come: their later parts must still be taken from the queue.
        self.open: dict[bytes, OpenRecord] = {}
        self._queue = queue
        self._encoder = encoder
        self._drops = drops
        self._settle = settle
        self._pending = PendingBegins()

    @property
    def requests(self) -> int:
        """How many requests have not ended."""
        return len(self.open) + len(self._pending)

    def slice(self, is_last: bool, begins_alone: bool = False) -> list[Framed]:
        """The frames of the next queued parts; with `is_last` no begin waits for its end.

        `begins_alone`: only the begins for which answers wait.
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
            self._take_chunks(chunks.pop(part.record_id, ()), frames)  # The earlier ones first.
            self._take(part, frames)
        for parts in chunks.values():
            self._take_chunks(parts, frames)
        # Last, because the parts may hold the end of a begin that no answer waits for.
        now = -math.inf if begins_alone else math.inf if is_last else time.monotonic()
        for pending in self._pending.take_due(now):
            self._take_begin(pending, frames)
        return frames

    def _take_with_begin(self, part: LaterPart, frames: list[Framed]) -> bool:
        """Takes a part whose begin still waits, together with that begin; otherwise writes the begin first."""
        self._take_begins(frames)  # The begin may have been queued since the last call.
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
        """Encodes a record as one frame; False if that fails: then each part is encoded alone."""
        begin = pending.begin
        try:
            payload = self._encoder.whole(begin, pending.inputs, end)
        except Exception:
            return False
        self.cost += pending.cost + end.cost
        frames.append(Framed(payload, begin, OpenRecord(begin.fields), ends_record=True))
        return True

    def _take_chunks(self, parts: Sequence[ChunkPart], frames: list[Framed]) -> None:
        """Encodes chunks of one record as one frame; a chunk that cannot be encoded is dropped alone."""
        if len(parts) > 1 and not (record := self.open[parts[0].record_id]).dropped:
            with contextlib.suppress(Exception):  # The loop below finds and logs the bad one.
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
