"""The thread that writes records to the spool.

It takes parts from the queue, redacts and encodes them (framing.py) and appends a batch with one write. Then it
notifies the answers that wait for their begins.

It polls every 30 ms while requests come. An answer whose begin is not yet written wakes it, and so does the first begin
after a pause. If many requests are open, and such answers come faster than every 6 ms, it polls every 3 ms instead and
settles them together. When an answer wakes it between two polls, it writes begins only: chunks of a record that are
written together are one frame. Each wake-up costs more than its write, because it takes the interpreter lock from the
event loop; for the same reason it works in slices with pauses between them.

Space: all spools together may hold `max_bytes`, and a little more for ends. Without space, a begin is dropped with its
record; a chunk is dropped and its record is incomplete; a record in one frame loses its tensors' contents first; an end
waits. No more ends wait than requests are open. After a failed write it retries twice a second at most, and ends use
the space that the spool has reserved for them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.payload.drops import DISK, FAILED, FULL, Drops
from headrace.payload.outbox.frames import FrameEncoder
from headrace.payload.outbox.framing import Framed, Framing
from headrace.payload.outbox.merge import INCOMPLETE
from headrace.payload.outbox.spool import Spool
from headrace.payload.parts import BeginPart, EndPart, PartQueue, RequestPart

_POLL_S = 0.03
_GATHER_S = 0.003
_MANY = 4  # Open requests from which on answers are settled together; sequential callers need not wait for each other.
_IDLE_S = 1.0
_RETRY_S = 0.5
_JOIN_S = 1.0
_NAP_S = 0.0002
_RESERVE_SHARE = 16  # Ends may exceed the maximum by this fraction of it (1/16).


class PayloadWriter:
    """Owns the thread.

    `orphans`: spools of ended processes, which this one ships. `settle` gets the parts for which answers may wait, once
    they are on disk or dropped, and returns whether an answer waits; `ended` is called after the end of a record.
    """

    def __init__(
        self,
        queue: PartQueue,
        spool: Spool,
        orphans: Sequence[Spool],
        drops: Drops,
        encoder: FrameEncoder,
        *,
        max_bytes: int,
        settle: Callable[[Sequence[BeginPart | RequestPart]], bool],
        ended: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._spool = spool
        self._orphans = orphans
        self._drops = drops
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._settle = settle
        self._ended = ended
        self._framing = Framing(queue, encoder, drops, settle)
        self._waiting_ends: deque[Framed] = deque()
        self._retry_at = 0.0
        self._busy_until = 0.0
        self._due_at = 0.0  # When it writes more than begins.
        self._settled = False  # Whether answers waited for the last write.
        self._settled_at = 0.0  # When answers last waited for a write before that.
        self._spooled = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="payload-writer", daemon=True)

    @property
    def spooled_bytes(self) -> int:
        """The size of the records on disk, of this process and of earlier ones."""
        return self._spool.size + sum(orphan.size for orphan in self._orphans)

    @property
    def spooled(self) -> int:
        """How many records were written from begin to end."""
        return self._spooled

    @property
    def idle(self) -> bool:
        """Whether all parts have been written or dropped."""
        return self._queue.empty and not self._waiting_ends

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Has the thread write the queued parts, for 1 s at most; returns whether every record on disk has its end."""
        self._stopping.set()
        self._queue.wake.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return False
        return self.idle and all(record.dropped for record in self._framing.open.values())

    def _run(self) -> None:
        while True:
            stopping = self._stopping.is_set()  # Read first: parts that were queued before the stop are written.
            is_due = stopping or self._queue.are_parts_hurried or time.monotonic() >= self._due_at
            try:
                self._write_slice(begins_alone=not is_due)
            except Exception:
                self._drops.count(FAILED, exc_info=True)
            self._queue.taken(self._framing.cost)
            if self._framing.cost and is_due and (stopping or not self._queue.empty):
                time.sleep(_NAP_S)
            elif stopping:
                return
            else:
                if is_due:
                    self._due_at = time.monotonic() + _POLL_S
                self._wait()

    def _wait(self) -> None:
        """Waits until there may be a part to write."""
        queue, now = self._queue, time.monotonic()
        if self._framing.open or self._waiting_ends or not queue.empty:
            self._busy_until = now + _IDLE_S
        if self._settled:
            self._settled = False
            is_soon, self._settled_at = now - self._settled_at < 2 * _GATHER_S, now
            if is_soon and self._framing.requests >= _MANY:
                queue.looks_soon = True
                time.sleep(_GATHER_S)
                return
        queue.looks_soon, queue.polled = False, now < self._busy_until
        # Otherwise something was put while `polled` or `looks_soon` was set, so its producer did not set `wake`: do not
        # sleep.
        if queue.empty or (queue.polled and not queue.hurried):
            queue.wake.wait(max(0.0, self._due_at - now) if queue.polled else _IDLE_S)
        queue.wake.clear()

    def _write_slice(self, begins_alone: bool) -> None:
        """Writes the next queued parts."""
        self._queue.hurried = False
        if not begins_alone:
            self._queue.are_parts_hurried = False
        self._write(self._framing.slice(self._stopping.is_set(), begins_alone))

    def _write(self, frames: Sequence[Framed]) -> None:
        failing = time.monotonic() < self._retry_at
        if not frames and (failing or not self._waiting_ends):
            return
        ends, self._waiting_ends = self._waiting_ends, deque()
        # A disk without room for the reserve has none for other frames.
        only_ends = failing or not self._spool.reserve()
        batch: list[Framed] = []
        room = self._max_bytes - self.spooled_bytes
        for frame in (*ends, *frames):
            is_end = isinstance(frame.part, EndPart)
            if frame.record.dropped:
                continue
            if failing or (only_ends and not is_end):
                self._drop(frame, DISK)
            elif len(frame.payload) > room + is_end * (self._max_bytes // _RESERVE_SHARE):
                if (smaller := self._without_contents(frame, room)) is None:
                    self._drop(frame, FULL)
                else:
                    batch.append(smaller)
                    room -= len(smaller.payload)
            else:
                batch.append(frame)
                room -= len(frame.payload)
        if batch and self._append(batch) and any(not frame.record.incomplete for frame in batch):
            self._drops.whole()
        if only_ends and not failing:
            self._retry_at = time.monotonic() + _RETRY_S
        waited_for = [frame.part for frame in frames if isinstance(frame.part, BeginPart | RequestPart)]
        if waited_for and self._settle(waited_for):
            self._settled = True

    def _without_contents(self, frame: Framed, room: int) -> Framed | None:
        """A record in one frame, without the contents of its tensors; None if it does not fit even so."""
        if not (frame.ends_record and isinstance(frame.part, BeginPart)):
            return None
        payload = self._encoder.whole_without_contents(frame.payload)
        if len(payload) > room:
            return None
        self._drops.count(FULL, of_another=not frame.record.incomplete)
        frame.record.incomplete = True
        return frame._replace(payload=payload)

    def _append(self, batch: Sequence[Framed]) -> bool:
        """Returns whether the frames are on disk."""
        try:
            self._spool.append([_payload(frame) for frame in batch])
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_S
            self._drops.warn("write", "the spool %s cannot be written: %s", self._spool.source, error.strerror)
            for frame in batch:
                if not frame.record.dropped:
                    self._drop(frame, DISK)
            self._use_reserve()
            return False
        self._count_ended(sum(frame.ends_record for frame in batch))
        return True

    def _use_reserve(self) -> None:
        """Writes the waiting ends: without them no segment could be deleted, and a full disk would stay full."""
        with contextlib.suppress(OSError):  # Already logged by `_append`; the ends stay queued.
            if self._waiting_ends and self._spool.release_reserve():
                self._spool.append([_payload(frame) for frame in self._waiting_ends])
                self._count_ended(len(self._waiting_ends))
                self._waiting_ends.clear()

    def _count_ended(self, records: int) -> None:
        if records:
            self._spooled += records
            self._ended()

    def _drop(self, frame: Framed, reason: str) -> None:
        """Drops a frame; an end is queued for a retry instead."""
        if isinstance(frame.part, EndPart):
            self._waiting_ends.append(frame)
            return
        for _ in range(frame.parts):
            self._drops.count(reason, of_another=not frame.record.incomplete)
            frame.record.incomplete = True
        if isinstance(frame.part, BeginPart):
            frame.record.dropped = True
            self._encoder.forget(frame.record)


def _payload(frame: Framed) -> bytes:
    """The bytes of a frame on disk.

    They mark the record as incomplete if earlier parts are missing: its end may never be written.
    """
    return frame.payload + INCOMPLETE if frame.record.incomplete else frame.payload
