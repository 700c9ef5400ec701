"""Encodes what recordings put and appends it to the outbox, in order, on one of two threads.

Usually that is the event loop's: to encode a part and to copy it to the outbox's mapping costs a few microseconds, a
fifth of waking a thread. It is the writer's own thread for parts above 256 KiB, with rules that look into contents
(redaction, contents or digests of tensors), and with `fsync`. That thread also prepares the outbox's segments. Begins
wait 25 ms for their ends and for answers, chunks for more of them. Where a busy event loop comes to the timer late, the
answer's next chunk after 40 ms writes those before it.

The thread that writes has the state of open records. When the first parts of one are in an old segment, they are copied
to the newest, so that a long stream keeps no segment on disk.

Space: without room a begin is dropped with its record; a chunk is dropped and its record is incomplete; a record whose
begin is not on disk loses its tensors' contents first; the end of another one waits.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from headrace.payload.drops import FAILED, FULL, TOO_LARGE, Drops
from headrace.payload.encoding import INCOMPLETE, Encoder, changed, clear_contents, fitted
from headrace.payload.frames import BEGIN, MORE, WHOLE
from headrace.payload.outbox import Outbox
from headrace.payload.parts import OpenRecord, Write
from headrace.payload.records import is_callers_own, shorten_refused
from headrace.rpc.limits.byte_budget import MAX_MESSAGE_BYTES
from headrace_protos.headrace_pb2 import PayloadRecord

MAX_RECORD_BYTES = MAX_MESSAGE_BYTES - 1024  # Room for what an AppendRequest adds.
_GATHER_S, LATE_S = 0.025, 0.04
_LARGE_BYTES = 256 << 10  # To encode and copy more takes the event loop too long.
_SLICE = 64  # Recordings whose chunks are written at once.
_IDLE_S, _RETRY_S = 1.0, 0.25
_JOIN_S = 1.0
# Parts are copied from segments that are this many behind the newest, and at most as often as a third of what is new.
_OLD_SEGMENTS, _COPY_SHARE = 4, 3


class PayloadWriter:
    """`put`, `later` and `start` belong to the event loop's thread; before `start` parts wait in memory."""

    def __init__(self, encoder: Encoder, drops: Drops, memory: int, *, is_inline: bool, fsync: bool) -> None:
        self.spooled = 0  # Records that are on disk from begin to end.
        self.answers = False  # Whether the writer settles begins, so that answers may wait for them.
        self._encoder = encoder
        self._drops = drops
        self._memory = memory
        self._is_inline = is_inline and not fsync
        self._fsync = fsync
        self._outbox: Outbox | None = None
        self._others_bytes: Callable[[], int] = int
        self._on_ended: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._puts: deque[Write] = deque()
        self._put_bytes = 0  # Changed by the event loop's thread alone.
        self._done_bytes = 0  # Changed by the thread that writes alone.
        self._later: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._open: dict[bytes, OpenRecord] = {}  # With parts on disk, in the order of their segments.
        self._open_bytes = 0
        self._ends: deque[Write] = deque()  # Without room.
        self._writing = threading.Lock()  # Only `close` ever waits for it.
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def waiting_bytes(self) -> int:
        """The size of what is put or announced and neither written nor dropped."""
        return self._put_bytes - self._done_bytes

    @property
    def idle(self) -> bool:
        """Whether everything is written or dropped."""
        return self._put_bytes == self._done_bytes and not self._ends

    def start(self, outbox: Outbox, others_bytes: Callable[[], int], ended: Callable[[], None]) -> None:
        """Begins to write; `ended` is called after the end of a record, `others_bytes` is for Outbox.prepare."""
        self._loop = asyncio.get_running_loop()
        self._others_bytes, self._on_ended = others_bytes, ended
        self._outbox, self.answers, outbox.syncs = outbox, True, self._fsync
        self._thread = threading.Thread(target=self._run, args=(outbox,), name="payload-writer", daemon=True)
        self._thread.start()
        self._write()

    def has_room(self, cost: int) -> bool:
        """Whether there is memory for a part of this cost."""
        return self.waiting_bytes + cost <= self._memory

    def reserve(self, cost: int) -> bool:
        """Takes memory for a part, if there is room; whoever takes it puts it."""
        if not self.has_room(cost):
            return False
        self._put_bytes += cost
        return True

    def put(self, write: Write, more: int = 0) -> None:
        """Writes, now or as soon as possible; `more` is the part of the cost that is not reserved."""
        self._put_bytes += more
        self._puts.append(write)
        if self._outbox is not None:
            self._write()

    def later(self, write: Callable[[], None]) -> None:
        """Calls `write` after 25 ms, once."""
        self._later[write] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.write_gathered)

    def write_gathered(self) -> None:
        """Writes the chunks that are gathered."""
        self._timer = None
        for write in list(self._later)[:_SLICE]:
            self._later.pop(write, None)
            write()
        if self._later and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self.write_gathered)

    def wake(self) -> None:
        """There may be room again; for any thread."""
        self._wake.set()

    def stop_waiting(self, root: object) -> None:
        """Lets answers go on without their begins on disk, until one is settled again."""
        self.answers = False
        self._drops.warn("stalled", "the disk of %s does not answer: requests go on without it", root)

    def close(self) -> bool:
        """Writes what is put, for 1 s at most, and ends the thread; returns whether all that is on disk has its end."""
        self.answers = False
        if self._outbox is None or self._thread is None:
            return True
        self._stopping.set()
        self._wake.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive() or not self._writing.acquire(timeout=_JOIN_S):
            return False
        with contextlib.suppress(Exception):
            self._pump(self._outbox)
        self._outbox = None
        self._writing.release()
        return self.idle and not self._open

    def _write(self) -> None:
        """On the event loop's thread: writes, or leaves it to the writer's."""
        if self._is_inline and self._outbox is not None and self._writing.acquire(blocking=False):
            try:
                self._pump(self._outbox, _LARGE_BYTES)
            finally:
                self._writing.release()
        else:
            self._wake.set()

    def _run(self, outbox: Outbox) -> None:
        while not self._stopping.is_set() or self._wake.is_set():  # At the end as long as a segment is missing.
            self._wake.wait(_IDLE_S if outbox.refusal is None else _RETRY_S)
            self._wake.clear()
            try:
                outbox.prepare(self._others_bytes())
                with self._writing:
                    self._copy_old(outbox)
                    self._pump(outbox)
            except Exception:
                self._drops.count(FAILED, exc_info=True)

    def _pump(self, outbox: Outbox, most_bytes: float = float("inf")) -> None:
        """Writes what is put, as far as there is room, up to a part of more than `most_bytes`."""
        while self._ends and self._append(outbox, self._ends[0], self._ends[0].encoded or b"", has_begun=True):
            self._ends.popleft()
        done: list[Write] = []
        while self._puts:
            write = self._puts[0]
            try:
                if write.size > most_bytes or not self._is_done(outbox, write):
                    self._wake.set()
                    break
            except Exception:
                self._lose(write.record, FAILED, exc_info=True)
            self._puts.popleft()
            done.append(write)
        if done and self._fsync:
            try:
                outbox.sync()
            except OSError as error:
                self._drops.warn("write", "the spool %s cannot be written: %s", outbox.source, error.strerror)
        for write in done:
            self._settle(write.record)
            self._done_bytes += write.cost

    def _settle(self, record: OpenRecord) -> None:
        if record.is_settled:
            return
        record.is_settled = True
        self.answers = not self._stopping.is_set()
        if record.waiting is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits any more.
                self._loop.call_soon_threadsafe(end_wait, record.waiting)

    def _is_done(self, outbox: Outbox, write: Write) -> bool:
        """Writes or drops; False if it has to wait for room."""
        record = write.record
        if write.encoded is None and not record.dropped:
            write.encoded = self._encode(write, outbox.largest)
        if write.end is not None:
            self._encoder.forget(record)
        if record.dropped or not write.encoded:
            if write.end is not None:
                self._forget(record)
            return True
        if not self._append(outbox, write, write.encoded, has_begun=bool(record.written)):
            if outbox.refusal is None:
                return False
            return self._refused(outbox, write, outbox.refusal)
        if not record.incomplete:
            self._drops.whole()
        return True

    def _encode(self, write: Write, largest: int) -> bytes:
        """What is new of the record; of an ended one all of it."""
        record, encoder = write.record, self._encoder
        parts: list[bytes] = list(record.written) if write.end is not None else []
        if not record.written:
            try:
                parts.append(encoder.begin(record))
            except Exception:
                record.dropped = True
                raise
            if record.inputs:
                self._add(parts, record, partial(encoder.inputs, record))
                record.inputs = ()
        if write.chunks:
            try:
                parts.append(encoder.chunks(write.chunks, record))
            except Exception:
                for chunk in write.chunks:  # Finds and logs the bad one.
                    self._add(parts, record, partial(encoder.chunks, (chunk,), record))
        end = write.end
        if end is not None and not self._add(parts, record, partial(encoder.end, end, record)):
            unknown = PayloadRecord(status="UNKNOWN", duration_ms=end.fields["duration_ms"], incomplete=True)
            parts.append(unknown.SerializeToString())
        if record.incomplete:
            parts.append(INCOMPLETE)
        data = b"".join(parts)
        if end is None:
            size = record.written_bytes + len(data)
            if size > min(largest, MAX_RECORD_BYTES):
                record.dropped = not record.written
                return self._lose(record, FULL if size > largest else TOO_LARGE)
            return data
        if is_callers_own(end.fields["status"]):
            data = changed(data, shorten_refused)
        if 2 * len(data) > MAX_RECORD_BYTES:  # With the text once more, which the logger joins.
            data = fitted(data, MAX_RECORD_BYTES) or self._lose(record, TOO_LARGE)
        if len(data) > largest:
            self._lose(record, FULL)
            data = fitted(data, largest) or b""
        return data

    def _add(self, parts: list[bytes], record: OpenRecord, encode: Callable[[], bytes]) -> bool:
        try:
            parts.append(encode())
        except Exception:
            self._lose(record, FAILED, exc_info=True)
            return False
        return True

    def _append(self, outbox: Outbox, write: Write, data: bytes, *, has_begun: bool) -> bool:
        record, newest = write.record, outbox.newest
        kind = WHOLE if write.end is not None else MORE if record.written else BEGIN
        if not outbox.append(kind, record.id, data, is_end=has_begun and kind == WHOLE):
            return False
        if kind == WHOLE:
            self._forget(record)
            self.spooled += 1
            self._on_ended()
        else:
            if kind == BEGIN:
                record.segment = outbox.newest
                self._open[record.id] = record
            record.written.append(data)
            record.written_bytes += len(data)
            self._open_bytes += len(data)
        if newest != outbox.newest:
            self._wake.set()
            self._copy_old(outbox)
        if outbox.needed != outbox.newest:
            outbox.needed = self._first_needed(outbox)
        return True

    def _forget(self, record: OpenRecord) -> None:
        if self._open.pop(record.id, None) is not None:
            self._open_bytes -= record.written_bytes
        record.written, record.written_bytes = [], 0

    def _first_needed(self, outbox: Outbox) -> int:
        return next((record.segment for record in self._open.values()), outbox.newest)

    def _copy_old(self, outbox: Outbox) -> None:
        """Copies the parts of records that have been open for long."""
        behind = 1  # Without room at once, because they may be all that keeps older segments.
        if outbox.refusal is None:
            behind = max(_OLD_SEGMENTS, _COPY_SHARE * self._open_bytes // outbox.segment_bytes)
        for record in list(self._open.values()):
            if outbox.newest - record.segment < behind:
                break
            record.written = [b"".join(record.written)]
            if not outbox.append(BEGIN, record.id, record.written[0]):
                break
            self._open[record.id] = self._open.pop(record.id)
            record.segment = outbox.newest
        outbox.needed = self._first_needed(outbox)

    def _refused(self, outbox: Outbox, write: Write, reason: str) -> bool:
        """Drops what finds no room; an end is kept for a retry instead."""
        record = write.record
        if write.end is None:
            self._lose(record, reason)
            record.dropped = not record.written
            return True
        if not record.written:
            less = changed(write.encoded or b"", clear_contents) + INCOMPLETE
            self._lose(record, reason)
            self._append(outbox, write, less, has_begun=False)
            return True
        write.encoded = (write.encoded or b"") + (INCOMPLETE if record.incomplete else b"")
        self._ends.append(write)
        self._forget(record)  # It needs its segments no longer: otherwise a full disk might stay full.
        outbox.needed = self._first_needed(outbox)
        self._on_ended()
        return True

    def _lose(self, record: OpenRecord, reason: str, exc_info: bool = False) -> bytes:
        self._drops.count(reason, of_another=not record.incomplete, exc_info=exc_info)
        record.incomplete = True
        return b""


def end_wait(waiting: asyncio.Future[None]) -> None:
    """Ends the wait of an answer; on the event loop."""
    if not waiting.done():
        waiting.set_result(None)
