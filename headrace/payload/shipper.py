"""Sends the records of an outbox to the payload logger, over `PayloadIngest/Append`.

A call carries one source, and a record's sequence is the number of its frame. Records are sent in batches. A batch
stays in memory, to be sent again over another call, until the logger has acknowledged all of it; only then the next one
is read. A segment is deleted when the logger has its records, and no record that has not ended began in it.

After the logger has refused a batch, its records are sent one at a time. A record that is refused alone, at every
retry, is dropped, counted and logged with its id: it must not block other records.

A `SourceShipper` belongs to the thread that runs it; its properties, `wake`, `hurry` and `stop` are for any thread.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import grpc

from headrace.payload.drops import DAMAGED, REFUSED
from headrace.payload.outbox import Outbox
from headrace.payload.reader import OutboxReader
from headrace.payload.recording import Recorder
from headrace.payload.records import ended_at
from headrace_protos.headrace_pb2 import AppendRequest, AppendResponse
from headrace_protos.spool_pb2 import Append

logger = logging.getLogger(__name__)

AppendCall: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, AppendResponse]"

_MAX_BATCH, _MAX_BATCH_BYTES = 1024, 16 << 20
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


class _Unacknowledged(NamedTuple):
    sequence: int
    segment: int
    request: bytes  # A serialized AppendRequest of this record alone.


class SourceShipper:
    """Ships one outbox; with `ends` it has no writer any more, and `run` ends once all is acknowledged."""

    def __init__(self, append: AppendCall, target: str, outbox: Outbox, recorder: Recorder, *, ends: bool) -> None:
        self.outbox = outbox
        self._append = append
        self._target = target
        self._drops = recorder.drops
        self._ends = ends
        self._freed = recorder.writer.wake
        self._reader = OutboxReader(outbox, recorder.hop, lambda: recorder.drops.count(DAMAGED), ends)
        self._batch: deque[_Unacknowledged] = deque()
        self._alone = 0  # How many of the batch, from the first, are sent alone.
        self._refusals = 0  # How often the first one was refused when it was sent alone.
        self._caught_up_at = 0 if ends else 1  # Frames before it are read; 0: there may be more.
        self._call: grpc.Call | None = None
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._hurry = threading.Event()
        self._gather_s = _GATHER_S
        self._gathered = 0

    @property
    def unacknowledged(self) -> int:
        """How many records were sent that the logger has yet to commit."""
        return len(self._batch)

    @property
    def oldest_s(self) -> float:
        """Time since the end of the oldest record that was sent and is not acknowledged; 0 if there is none."""
        try:
            oldest = AppendRequest.FromString(self._batch[0].request)
        except IndexError:
            return 0.0
        # By the wall clock, because another process may have recorded it.
        return max(0.0, time.time() - ended_at(oldest.record))

    @property
    def idle(self) -> bool:
        """Whether the logger has every record that has ended; of an outbox without a writer, every record."""
        return self._caught_up_at == self.outbox.next_number and not self._batch

    def wake(self) -> None:
        """Wakes the thread: the outbox has a new record."""
        if not self._changed.is_set():  # Each record asks; to set it takes a lock.
            self._changed.set()

    def hurry(self) -> None:
        """From now on sends records at once, without waiting for more of them."""
        self._hurry.set()
        self._changed.set()

    def stop(self) -> None:
        """Ends `run`; what is not acknowledged stays in the outbox."""
        self._stopping.set()
        self.hurry()
        if (call := self._call) is not None:
            call.cancel()

    def run(self) -> None:
        """Sends over one call after another, until the stop or the end of the outbox."""
        backoff_s, away_since_s = _MIN_BACKOFF_S, time.monotonic()
        while not self._done():
            before = self._batch[0].sequence if self._batch else 0
            try:
                reason = self._ship_over_one_call()
            except Exception:
                reason = "internal error"
                self._drops.warn("shipper", "shipping %s failed", self.outbox.source, exc_info=True)
            if self._done():
                return
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if not self._batch or self._batch[0].sequence != before:
                backoff_s, away_since_s = _MIN_BACKOFF_S, time.monotonic()
            if time.monotonic() - away_since_s >= _AWAY_S:  # At the start of a stack it may come later.
                self._drops.warn("away", "the payload logger at %s is away (%s)", self._target, reason)
            # Jitter, so that several transformers do not reconnect at the same moment.
            self._stopping.wait(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311

    def _done(self) -> bool:
        return self._stopping.is_set() or (self._ends and self.idle)

    def _ship_over_one_call(self) -> str:
        """Sends until the call ends; returns why it ended."""
        requests: SimpleQueue[bytes | None] = SimpleQueue()  # gRPC's own thread sends them.
        self._call = call = self._append(iter(requests.get, None))
        try:
            while not self._done():
                if not self._batch and not self._read_batch():
                    continue
                for message in self._messages():
                    requests.put(message)
                if not self._is_acknowledged(call):
                    return "it ended the call"
        except grpc.RpcError as error:
            self._count_refusal(error.code(), error.details())
            return f"{error.code().name}: {error.details()}"
        finally:
            requests.put(None)
            call.cancel()
        return "the call is not needed any more"

    def _read_batch(self) -> bool:
        """Reads the next records, and waits for more of them if all were read before; returns whether there are any."""
        if not self._ends and self._caught_up_at:
            if self._caught_up_at == self.outbox.next_number:
                self._changed.wait(_LOOK_S)
            busy = self._gathered >= _BUSY_PER_S * self._gather_s
            self._gather_s = _BUSY_GATHER_S if busy else _GATHER_S
            self._hurry.wait(self._gather_s)
        self._changed.clear()
        self._caught_up_at, size = 0, 0
        while len(self._batch) < _MAX_BATCH and size < _MAX_BATCH_BYTES:
            number = self.outbox.next_number
            if (found := self._reader.next()) is None:
                self._caught_up_at = number
                break
            segment, frame = found
            request = Append(source=self.outbox.source, sequence=frame.number, record=frame.contents)
            self._batch.append(_Unacknowledged(frame.number, segment, request.SerializeToString()))
            size += len(self._batch[-1].request)
            if len(self._batch) % _SLICE == 0:
                time.sleep(_NAP_S)
        self._gathered = len(self._batch)
        if not self._batch:
            self._delete()
        return bool(self._batch)

    def _messages(self) -> list[bytes]:
        """What is sent now of the batch, many records in one message."""
        unsent = [one.request for one in islice(self._batch, 1 if self._alone else None)]
        messages = []
        while unsent:
            size, together = 0, 0
            while together < len(unsent) and (not together or size + len(unsent[together]) <= _MESSAGE_BYTES):
                size += len(unsent[together])
                together += 1
            # Protobuf merges concatenated messages.
            messages.append(unsent[0] + Append(more=unsent[1:together]).SerializeToString())
            del unsent[:together]
        return messages

    def _is_acknowledged(self, call: Iterator[AppendResponse]) -> bool:
        """Waits until what was sent is acknowledged; False if the call ends before."""
        last = self._batch[0 if self._alone else -1].sequence
        for response in call:
            while self._batch and self._batch[0].sequence <= response.sequence:
                self._forget_first()
            self._delete()
            if response.sequence >= last:
                return True
        return False

    def _count_refusal(self, code: grpc.StatusCode, details: str | None) -> None:
        """After a refusal by the logger: sends records alone from now on, or drops a record that was sent alone."""
        if code not in _MAX_REFUSALS or not self._batch:
            return
        if not self._alone:
            self._alone, self._refusals = len(self._batch), 0
            return
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS[code]:
            refused = AppendRequest.FromString(self._batch[0].request)
            logger.error(
                "the payload logger refuses the record %s of the request %r, %d bytes, which is dropped: %s: %s",
                *(refused.record.record_id, refused.record.request_id, refused.ByteSize(), code.name, details),
            )
            self._drops.count(REFUSED)
            self._forget_first()

    def _forget_first(self) -> None:
        self._batch.popleft()
        self._alone = max(0, self._alone - 1)
        self._refusals = 0

    def _delete(self) -> None:
        """Deletes the segments that hold nothing still needed."""
        # Records without an end follow those with one, and may be in earlier segments.
        needed = min((self._reader.needed, *(one.segment for one in self._batch)))
        try:
            if self.outbox.delete_before(needed):
                self._freed()
        except OSError as error:
            self._drops.warn("delete", "a segment of the spool cannot be deleted: %s", error.strerror)
