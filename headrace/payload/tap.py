"""Records requests and answers beside the stream, and sends the records to the payload logger through an outbox.

`tap.begin(...)` opens a `Recording`. Its methods keep references, cost microseconds, never block and never raise, so
that a fault here cannot stop the stream. Only `flushed` is awaited, for a second at most, and seldom.

    Recording → PayloadWriter → Outbox, on disk → thread payload-shipper → the logger

What is not written yet is bounded by `memory` bytes, the outbox by `spool_max` bytes. Beyond these bounds parts are
dropped, and counted in `dropped` by reason. Without its begin the whole record is dropped; without a chunk the record
is `incomplete`; the end of a record that began is never dropped. The outbox survives this process: the next process
with the same folder ships it, and ends its open records as ABORTED.

`start`, `begin`, `drain` and `Recording` belong to one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace.errors import StartupError
from headrace.payload.drops import DISK, Drops
from headrace.payload.encoding import Encoder
from headrace.payload.outbox import Outbox, open_outboxes
from headrace.payload.parts import Begin, Tensors
from headrace.payload.recording import Recorder, Recording
from headrace.payload.records import next_id
from headrace.payload.rules import Digest, PayloadRules
from headrace.payload.settings import RecordingSettings
from headrace.payload.shipping import PayloadShipping
from headrace.payload.writer import PayloadWriter

logger = logging.getLogger(__name__)

REASON = "headrace.reason"
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
        self.rules = rules or PayloadRules()
        self._target = target
        self._root = spool
        self._spool_max = spool_max
        self._drops = Drops()
        looks_into = self.rules.redactions or self.rules.tensor_bytes or self.rules.tensor_digest is not Digest.OFF
        encoder = Encoder(self.rules, memory)
        self._writer = PayloadWriter(encoder, self._drops, memory, is_inline=not looks_into, fsync=fsync)
        self._recorder = Recorder(self.rules, self._writer, self._drops, hop, spool)
        self._last_id = 0
        self._boxes: list[Outbox] = []
        self._shipper: PayloadShipping | None = None
        self._opening: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: RecordingSettings, hop: str) -> PayloadTap:
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
        return self._writer.waiting_bytes

    @property
    def spooled_bytes(self) -> int:
        """The size of the records on disk."""
        return sum(box.size for box in self._boxes)

    @property
    def spooled(self) -> int:
        """How many records this process has written to disk from begin to end."""
        return self._writer.spooled

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
            self._start(*open_outboxes(self._root, self._spool_max))
        except StartupError as error:
            if not error.is_fault:
                raise
            logger.error("%s; records wait in memory meanwhile", error)
            self._opening = asyncio.create_task(self._open_later(), name="open the spool")

    async def _open_later(self) -> None:
        while self._shipper is None:
            await asyncio.sleep(_OPEN_AGAIN_S)
            with contextlib.suppress(StartupError):
                self._start(*await asyncio.to_thread(open_outboxes, self._root, self._spool_max))
                logger.warning("the spool folder %s can be used again: records go there", self._root)

    def _start(self, own: Outbox, orphans: list[Outbox]) -> None:
        self._boxes = [own, *orphans]
        self._shipper = PayloadShipping(self._target, own, orphans, self._drops, self._recorder.hop, self._writer.wake)
        self._writer.start(own, lambda: sum(orphan.size for orphan in orphans), self._shipper.own.wake)
        self._shipper.start()

    def begin(self, begin: Begin, inputs: Tensors = ()) -> Recording:
        """Opens the recording of a request that arrived now."""
        now_ns = time.time_ns()
        self._last_id = next_id(now_ns // 1_000_000, self._last_id)
        return Recording(self._recorder, self._last_id, begin._replace(time_us=now_ns // 1_000), inputs)

    def observe(self, meter: Meter | None = None) -> None:
        """Registers the metrics of the process's records; the metrics reader's thread collects them.

        The drops have the attribute REASON; every reason has a value from the start.
        """
        meter = meter or metrics.get_meter("headrace")
        gauge, counter = meter.create_observable_gauge, meter.create_observable_counter
        waiting = "Size of the parts of records that wait in memory for the disk."
        on_disk = "Size of the records on disk, of this process and of earlier ones."
        age = "Time since the end of the oldest record that the logger has not acknowledged; 0 if there is none."
        whole = "Records that were written to disk from begin to end."
        lost = "Parts of records that were dropped; a dropped begin drops its whole record."
        gauge("headrace.payload.queued_bytes", [lambda _: [Observation(self.queued_bytes)]], "By", waiting)
        gauge("headrace.payload.spool_bytes", [lambda _: [Observation(self.spooled_bytes)]], "By", on_disk)
        gauge("headrace.payload.spool_age", [lambda _: [Observation(self.oldest_s)]], "s", age)
        counter("headrace.payload.spooled", [lambda _: [Observation(self.spooled)]], "{record}", whole)
        counter("headrace.payload.dropped", [self._observed_drops], "{part}", lost)

    def _observed_drops(self, _: CallbackOptions) -> list[Observation]:
        return [Observation(count, {REASON: reason}) for reason, count in self._drops.so_far().items()]

    async def drain(self, timeout_s: float) -> bool:
        """Ships ended records until the logger has all of them or the timeout expires; the rest stays on disk.

        Returns whether the logger has all of them.
        """
        self._writer.write_gathered()
        if self._shipper is None:
            return self._writer.idle
        deadline = time.monotonic() + timeout_s
        while not (done := self._writer.idle and self._shipper.idle) and time.monotonic() < deadline:
            self._writer.wake()
            self._shipper.own.hurry()
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
        """Writes what is put and ends the threads, each within a second; not for the event loop's thread."""
        written = self._writer.close()
        if self._shipper is not None:
            self._shipper.close(remove=written)
        elif not self._writer.idle:
            self._drops.count(DISK)
        self._drops.whole(at_end=True)
