"""Sends the records of an outbox to the payload logger, over `PayloadIngest/Append`.

A call carries one source. A record's sequence is the number of its frame. Unacknowledged records are kept in memory,
up to a bound, to be sent again after a reconnect. At the bound nothing more is read from the outbox. A segment is
deleted when the logger has its records, and no record that has not ended began in it.

Of an outbox whose process has ended, the parts of records that have not ended are sent last, as ABORTED.

After the logger has refused a message, the unacknowledged records are sent one at a time. A record that is refused
alone, at every retry, is dropped, counted and logged with its id: it must not block other records.

A `SourceShipper` belongs to the thread that runs it; its properties, `wake`, `hurry` and the stop are for any thread.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import grpc

from headrace.payload.append_call import AppendCall, OpenCall
from headrace.payload.drops import DAMAGED, REFUSED, Drops
from headrace.payload.outbox import Frame, Outbox
from headrace.payload.reader import OutboxReader
from headrace.payload.records import ended_at
from headrace_protos.headrace_pb2 import AppendRequest
from headrace_protos.spool_pb2 import Append

logger = logging.getLogger(__name__)

_MAX_UNACKNOWLEDGED = 1024
_MAX_UNACKNOWLEDGED_BYTES = 16 << 20
_MESSAGE_BYTES = 1 << 20  # The most that several records in one message take.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_AWAY_S = 5.0  # Before which there is no warning.
_LOOK_S = 1.0
# Sent and committed together, records cost a fraction of single ones: at high rates they wait longer for each other.
_GATHER_S, _BUSY_GATHER_S, _BUSY_PER_S = 0.1, 0.5, 20
_SLICE, _NAP_S = 64, 0.0002  # Records: while they are read, the event loop does not run.
# How often a record is refused, alone, before it is dropped.
_MAX_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: 3,
    grpc.StatusCode.OUT_OF_RANGE: 3,
    grpc.StatusCode.INTERNAL: 20,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 20,
    grpc.StatusCode.UNKNOWN: 20,
}


class _Sent(NamedTuple):
    sequence: int
    segment: int
    request: bytes  # A serialized AppendRequest of this record alone.


class SourceShipper:
    """Ships one outbox; with `ends` it has no writer any more, and `run` ends once all is acknowledged.

    `freed` is called when room has become free.
    """

    def __init__(
        self,
        append: AppendCall,
        target: str,
        outbox: Outbox,
        drops: Drops,
        hop: str,
        stopping: threading.Event,
        freed: Callable[[], None],
        ends: bool,
    ) -> None:
        self.outbox = outbox
        self._append = append
        self._target = target
        self._drops = drops
        self._stopping = stopping
        self._ends = ends
        self._freed = freed
        self._reader = OutboxReader(outbox, hop, lambda: drops.count(DAMAGED), ends)
        self._unacknowledged: deque[_Sent] = deque()
        self._unacknowledged_bytes = 0
        self._sent = 0  # How many unacknowledged records, from the first, were sent over this call.
        self._alone_until = 0  # The last sequence that is sent alone.
        self._refusals = 0  # How often the first unacknowledged record was refused when it was sent alone.
        self._acknowledged = 0  # The newest sequence that the logger has committed.
        self._caught_up_at = 0 if ends else 1  # All frames before this number have been read.
        self._changed = threading.Event()
        self._hurry = threading.Event()
        self._gather_s = _GATHER_S
        self._gathered = 0

    @property
    def unacknowledged(self) -> int:
        """How many records were sent that the logger has yet to commit."""
        return len(self._unacknowledged)

    @property
    def oldest_s(self) -> float:
        """Time since the end of the oldest record that was sent and is not acknowledged; 0 if there is none."""
        try:
            oldest = AppendRequest.FromString(self._unacknowledged[0].request)
        except IndexError:
            return 0.0
        # By the wall clock, because another process may have recorded it.
        return max(0.0, time.time() - ended_at(oldest.record))

    @property
    def idle(self) -> bool:
        """Whether the logger has every record that has ended; of a spool without a writer, every record."""
        return self._caught_up_at == self.outbox.next_number and not self._unacknowledged

    def wake(self) -> None:
        """Wakes the thread: the outbox has a new record."""
        if not self._changed.is_set():  # Each record asks; to set it takes a lock.
            self._changed.set()

    def hurry(self) -> None:
        """From now on sends records at once, without waiting for more of them."""
        self._hurry.set()
        self._changed.set()

    def run(self) -> None:
        """Sends over one call after another, until the stop or the end of the spool."""
        backoff_s, away_since_s = _MIN_BACKOFF_S, time.monotonic()
        while not self._done():
            acknowledged = self._acknowledged
            try:
                reason = self._ship_over_one_call()
            except Exception:
                reason = "internal error"
                self._drops.warn("shipper", "shipping %s failed", self.outbox.source, exc_info=True)
            if self._done():
                return
            if acknowledged != self._acknowledged:
                away_since_s = time.monotonic()
            if time.monotonic() - away_since_s >= _AWAY_S:  # At the start of a stack it may come later.
                self._drops.warn("away", "the payload logger at %s is away (%s)", self._target, reason)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S) if acknowledged == self._acknowledged else _MIN_BACKOFF_S
            # Jitter, so that several transformers do not reconnect at the same moment.
            self._stopping.wait(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311

    def _done(self) -> bool:
        return self._stopping.is_set() or (self._ends and self.idle)

    def _ship_over_one_call(self) -> str:
        """Sends until the call ends; returns why it ended."""
        call = OpenCall(self._append, self._changed)
        try:
            self._sent = 0
            while True:
                self._changed.clear()
                ended = call.ended  # Read first: acknowledgements from before the end are valid.
                self._forget_acknowledged(call.acknowledged)
                more = self._take_some()
                self._send_unsent(call)
                if ended is not None or self._done():
                    self._count_refusal(call)
                    return ended or "the call is not needed any more"
                if more:
                    time.sleep(_NAP_S)
                else:
                    self._changed.wait(_LOOK_S)
                    if not self._is_full:
                        self._gather()
        finally:
            call.close()

    def _gather(self) -> None:
        """Waits for more records, to send them together."""
        busy = self._gathered >= _BUSY_PER_S * self._gather_s
        self._gather_s, self._gathered = _BUSY_GATHER_S if busy else _GATHER_S, 0
        self._hurry.wait(self._gather_s)

    @property
    def _is_full(self) -> bool:
        """Whether the logger must acknowledge a record before another one may be sent."""
        return (
            len(self._unacknowledged) >= _MAX_UNACKNOWLEDGED
            or self._unacknowledged_bytes >= _MAX_UNACKNOWLEDGED_BYTES
            or self._goes_alone
        )

    @property
    def _goes_alone(self) -> bool:
        """Whether the first unacknowledged record is sent alone."""
        return bool(self._unacknowledged) and self._unacknowledged[0].sequence <= self._alone_until

    def _send_unsent(self, call: OpenCall) -> None:
        """Sends the unacknowledged records that were not yet sent over this call, many in one message."""
        count = 1 if self._goes_alone else len(self._unacknowledged)
        unsent = [sent.request for sent in islice(self._unacknowledged, self._sent, count)]
        self._sent = max(self._sent, count)
        while unsent:
            size, together = 0, 0
            while together < len(unsent) and (not together or size + len(unsent[together]) <= _MESSAGE_BYTES):
                size += len(unsent[together])
                together += 1
            # Protobuf merges concatenated messages.
            call.send(unsent[0] + Append(more=unsent[1:together]).SerializeToString())
            del unsent[:together]

    def _count_refusal(self, call: OpenCall) -> None:
        """After a refusal by the logger: sends records alone from now on, or drops a record that was sent alone."""
        if call.code not in _MAX_REFUSALS or not self._unacknowledged:
            return
        if not self._goes_alone:
            self._alone_until, self._refusals = self._unacknowledged[-1].sequence, 0
            return
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS[call.code]:
            refused = AppendRequest.FromString(self._unacknowledged[0].request)
            logger.error(
                "the payload logger refuses the record %s of the request %r, %d bytes, which is dropped: %s",
                *(refused.record.record_id, refused.record.request_id, refused.ByteSize(), call.ended),
            )
            self._drops.count(REFUSED)
            self._forget_first()

    def _take_some(self) -> bool:
        """Reads the next records; returns whether there may be more to send now."""
        for _ in range(_SLICE):
            if self._is_full:
                return False
            number = self.outbox.next_number
            found = self._reader.next()
            if found is None:
                self._caught_up_at = number
                self._delete()
                return False
            self._take(*found)
        return True

    def _take(self, segment: int, frame: Frame) -> None:
        request = Append(source=self.outbox.source, sequence=frame.number, record=frame.contents).SerializeToString()
        self._unacknowledged.append(_Sent(frame.number, segment, request))
        self._unacknowledged_bytes += len(request)
        self._gathered += 1

    def _forget_acknowledged(self, sequence: int) -> None:
        if sequence <= self._acknowledged:
            return
        self._acknowledged = sequence
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            self._forget_first()
        self._delete()

    def _forget_first(self) -> None:
        self._unacknowledged_bytes -= len(self._unacknowledged.popleft().request)
        self._sent = max(0, self._sent - 1)
        self._refusals = 0

    def _delete(self) -> None:
        """Deletes the segments that hold nothing still needed."""
        needed = self._reader.needed
        if self._unacknowledged:
            needed = min(needed, self._unacknowledged[0].segment)
        try:
            if self.outbox.delete_before(needed):
                self._freed()
        except OSError as error:
            self._drops.warn("delete", "a segment of the spool cannot be deleted: %s", error.strerror)
