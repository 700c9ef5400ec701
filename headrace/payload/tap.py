"""Records requests and answers beside the stream, and sends the records to the payload logger through a spool on disk.

`tap.begin(...)` opens a `Recording`. Its methods keep references, cost microseconds, never block and never raise, so
that a fault here cannot stop the stream. Only `flushed` is awaited, for a second at most, and seldom: the spool's
journal has most begins at once.

    event loop: Recording → PartQueue → thread payload-writer: Spool → thread payload-shipper: the logger

The queue to the writer is bounded by `memory` bytes, the spool by `spool_max` bytes. Beyond these bounds parts are
dropped, and counted in `dropped` by reason. Without its begin the whole record is dropped; without a chunk the record
is `incomplete`; the end of a record that began is never dropped. The spool survives this process: the next process with
the same spool folder ships it, and ends its open records as ABORTED.

`start`, `begin`, `drain` and `Recording` belong to one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import StartupError
from headrace.payload.drops import DISK, Drops
from headrace.payload.ids import next_id
from headrace.payload.outbox.frames import FrameEncoder
from headrace.payload.outbox.journal import MAX_FRAME_BYTES, Journal
from headrace.payload.outbox.spool import Spool, open_spools
from headrace.payload.outbox.writer import PayloadWriter
from headrace.payload.parts import BeginPart, Fields, PartQueue, RequestPart, Tensors
from headrace.payload.recording import Recording, end_waits
from headrace.payload.rules import PayloadRules
from headrace.payload.settings import RecordingSettings
from headrace.payload.shipping import PayloadShipping

logger = logging.getLogger(__name__)

_OPEN_AGAIN_S = 1.0
_POLL_S = 0.01  # The interval at which a drain checks whether it is done.


class PayloadTap:
    """Opens recordings and ships them to the logger at `target` (host:port); its folder in `spool` is new.

    `hop` is the failed hop of recorded errors that name none.
    """

    def __init__(
        self,
        target: str,
        rules: PayloadRules | None = None,
        *,
        spool: Path,
        spool_max: int = 1 << 30,
        memory: int = 64 << 20,
        fsync: bool = False,
        hop: str = "transformer",
    ) -> None:
        self.hop = hop
        self.rules = rules or PayloadRules()
        self._target = target
        self._root = spool
        self._spool_max = spool_max
        self._memory = memory
        self._fsync = fsync
        self._drops = Drops()
        self._queue = PartQueue(memory)
        self._last_id = 0
        self._spool: Spool | None = None
        self._writer: PayloadWriter | None = None
        self._shipper: PayloadShipping | None = None
        self._opening: asyncio.Task[None] | None = None
        self._begins_answered = False  # Whether the writer settles begins, so that answers wait for them.

    @classmethod
    def of(cls, settings: RecordingSettings, hop: str) -> PayloadTap:
        """A tap with a service's settings."""
        return cls(
            settings.logger,
            settings.payload_rules,
            spool=settings.payload_spool,
            spool_max=settings.payload_spool_max,
            memory=settings.payload_queue_memory,
            fsync=settings.payload_spool_fsync,
            hop=hop,
        )

    @property
    def dropped(self) -> Counter[str]:
        """How many parts were dropped, by reason."""
        return self._drops.counts

    @property
    def queued_bytes(self) -> int:
        """The size of the parts that wait in memory for the disk."""
        return self._queue.waiting_bytes

    @property
    def spooled_bytes(self) -> int:
        """The size of the records on disk."""
        return self._writer.spooled_bytes if self._writer else 0

    @property
    def spooled(self) -> int:
        """How many records this process has written to disk from begin to end."""
        return self._writer.spooled if self._writer else 0

    @property
    def dropped_so_far(self) -> dict[str, int]:
        """A copy of `dropped`, with every reason; for any thread."""
        return self._drops.so_far()

    @property
    def oldest_s(self) -> float:
        """Time since the end of the oldest record that was sent and is not acknowledged; 0 if none; for any thread."""
        return self._shipper.oldest_s if self._shipper else 0.0

    @property
    def unacknowledged(self) -> int:
        """How many records were sent that the logger has yet to commit."""
        return self._shipper.unacknowledged if self._shipper else 0

    def start(self) -> None:
        """Opens the spool and starts the threads; raises StartupError if the setting of the folder is wrong.

        While the disk cannot take a spool, parts wait in memory up to the bound, and it is tried again.
        """
        try:
            self._start(*open_spools(self._root, self._spool_max, self._fsync))
        except StartupError as error:
            if not error.is_fault:
                raise
            logger.error("%s; records wait in memory meanwhile", error)
            self._opening = asyncio.create_task(self._open_later(), name="open the spool")

    async def _open_later(self) -> None:
        while self._writer is None:
            await asyncio.sleep(_OPEN_AGAIN_S)
            with contextlib.suppress(StartupError):
                self._start(*await asyncio.to_thread(open_spools, self._root, self._spool_max, self._fsync))
                logger.warning("the spool folder %s can be used again: records go there", self._root)

    def _start(self, own: Spool, orphans: list[Spool]) -> None:
        loop = asyncio.get_running_loop()

        def settle(parts: Sequence[BeginPart | RequestPart]) -> bool:
            self._begins_answered = True
            waiting = [future for part in parts if (future := part.settled()) is not None]
            if waiting:
                with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits any more.
                    loop.call_soon_threadsafe(end_waits, waiting)
            return bool(waiting)

        self._spool = own
        self._shipper = PayloadShipping(self._target, own, orphans, self._drops, self.hop)
        self._writer = PayloadWriter(
            *(self._queue, own, orphans, self._drops, FrameEncoder(self.rules, self._memory)),
            max_bytes=self._spool_max,
            settle=settle,
            ended=self._shipper.wake,
        )
        self._begins_answered = True
        self._writer.start()
        self._shipper.start()

    def begin(
        self,
        *,
        request_id: str,
        model: str,
        protocol: str,
        prompt: str = "",
        parameters: str = "",
        trace_id: str = "",
        span_id: str = "",
        metadata: Mapping[str, str] | None = None,
        client: str = "",
        call_id: str = "",
        inputs: Tensors = (),
    ) -> Recording:
        """Opens the recording of a request that arrived now; `parameters` is JSON."""
        now_ns = time.time_ns()
        self._last_id = next_id(now_ns // 1_000_000, self._last_id)
        recording = Recording(self, self._last_id)
        fields = Fields(request_id, model, prompt, parameters, trace_id, span_id, client, call_id, metadata or {})
        recording._begin(now_ns // 1_000, protocol, fields, inputs)
        return recording

    async def drain(self, timeout_s: float) -> bool:
        """Ships ended records until the logger has all of them or the timeout expires; the rest stays on disk.

        Returns whether the logger has all of them.
        """
        if self._writer is None or self._shipper is None:
            return self._queue.empty
        deadline = time.monotonic() + timeout_s
        while not (done := self._writer.idle and self._shipper.idle) and time.monotonic() < deadline:
            self._queue.wake.set()
            self._shipper.hurry()
            await asyncio.sleep(_POLL_S)
        if not done:
            self._drops.warn("drain", "payload records are left in %s: the next start sends them", self._root)
        return done

    async def stop(self, timeout_s: float) -> None:
        """Drains, then ends the threads."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.drain(timeout_s)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Writes the queued parts and ends the threads, each within a second; not for the event loop's thread."""
        self._begins_answered = False
        if self._writer is not None and self._shipper is not None:
            written = self._writer.close()
            self._shipper.close(remove=written)
        for _ in self._queue.begins if self._writer is None else ():
            self._drops.count(DISK)
        self._drops.whole(at_end=True)

    def _journal_for(self, begin: BeginPart) -> Journal | None:
        """The journal that may keep the begin as it is; none if rules may redact it, or it is surely too large."""
        if self._spool is None or self.rules.redactions or begin.cost > MAX_FRAME_BYTES:
            return None
        return self._spool.journal

    def _stop_waiting(self) -> None:
        """Lets answers go on without their begins on disk, until the writer settles a part again."""
        self._begins_answered = False
        self._drops.warn("stalled", "the disk of %s does not answer: requests go on without it", self._root)
