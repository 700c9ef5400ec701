"""Records requests and answers beside the stream, and sends the records to the payload logger through an outbox.

`tap.begin(...)` opens a `Recording`. Its methods keep references, cost microseconds, never block and never raise, so
that a fault here cannot stop the stream. Only `flushed` is awaited, for a second at most, and seldom.

    Recording → PayloadWriter → Outbox, on disk → thread payload-shipper → the logger

A second thread ships the spools of ended processes, one after the other; each is removed once the logger has all its
records.

What is not written yet is bounded by `memory` bytes, the outbox by `spool_max` bytes. Beyond these bounds parts are
dropped, and counted in `dropped` by reason. Without its begin the whole record is dropped; without a chunk the record
is `incomplete`; the end of a record that began is never dropped. The outbox survives this process: the next process
with the same folder ships it, and ends its open records as ABORTED.

`start`, `begin`, `drain` and `Recording` belong to one event loop's thread.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from functools import partial

import grpc
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace.errors import StartupError
from headrace.payload.drops import DISK, Drops
from headrace.payload.encoding import Encoder
from headrace.payload.outbox import Outbox, open_outboxes
from headrace.payload.parts import Begin, Tensors
from headrace.payload.recording import Recorder, Recording
from headrace.payload.records import next_id
from headrace.payload.rules import Digest
from headrace.payload.settings import RecordingSettings
from headrace.payload.shipper import AppendCall, SourceShipper
from headrace.payload.writer import PayloadWriter
from headrace.rpc.client.channel import channel_options
from headrace_protos.headrace_pb2 import AppendResponse

logger = logging.getLogger(__name__)

REASON = "headrace.reason"
_OPEN_AGAIN_S = 1.0
_POLL_S = 0.01  # The interval at which a drain checks whether it is done.
_APPEND = "/headrace.v1.PayloadIngest/Append"
_JOIN_S = 1.0
# A logger that is stopped but not dead keeps its connection: only a ping detects it.
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 10.0, 5.0


class PayloadTap:
    """Opens recordings and ships them to the logger of the settings, from a new folder in their spool.

    `hop` is the failed hop of recorded errors that name none.
    """

    def __init__(self, settings: RecordingSettings, hop: str) -> None:
        self.rules = rules = settings.payload_rules
        self._target, self._root = settings.logger, settings.payload_spool
        self._spool_max = settings.payload_spool_max
        self._drops = Drops()
        self.dropped = self._drops.counts  # How many parts, by reason.
        looks_into = rules.redactions or rules.tensor_bytes or rules.tensor_digest is not Digest.OFF
        memory = settings.payload_queue_memory
        self._writer = PayloadWriter(
            Encoder(rules, memory), self._drops, memory, is_inline=not looks_into, fsync=settings.payload_spool_fsync
        )
        self._recorder = Recorder(rules, self._writer, self._drops, hop, settings.payload_spool)
        self._last_id = 0
        self._boxes: list[Outbox] = []
        # Once the spool is open: what ships this process's records, and those of ended ones.
        self._own: SourceShipper | None = None
        self._orphans: deque[SourceShipper] = deque()
        self._channel: grpc.Channel | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._opening: asyncio.Task[None] | None = None

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
        return max((source.oldest_s for source in self._sources), default=0.0)

    @property
    def unacknowledged(self) -> int:
        """How many records were sent that the logger has yet to commit."""
        return sum(source.unacknowledged for source in self._sources)

    @property
    def _sources(self) -> tuple[SourceShipper, ...]:
        return () if self._own is None else (self._own, *self._orphans)

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
        while self._own is None:
            await asyncio.sleep(_OPEN_AGAIN_S)
            with contextlib.suppress(StartupError):
                self._start(*await asyncio.to_thread(open_outboxes, self._root, self._spool_max))
                logger.warning("the spool folder %s can be used again: records go there", self._root)

    def _start(self, own: Outbox, orphans: list[Outbox]) -> None:
        self._boxes = [own, *orphans]
        # Neither traced nor recorded: the channel belongs to no request.
        options = channel_options(_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S)
        self._channel = grpc.insecure_channel(self._target, options=options)
        append: AppendCall = self._channel.stream_stream(_APPEND, response_deserializer=AppendResponse.FromString)
        ship = partial(SourceShipper, append, self._target, recorder=self._recorder)
        self._own = ship(own, ends=False)
        self._orphans = deque(ship(orphan, ends=True) for orphan in orphans)
        self._writer.start(own, lambda: sum(orphan.size for orphan in orphans), self._own.wake)
        self._threads = [
            threading.Thread(target=self._own.run, name="payload-shipper", daemon=True),
            threading.Thread(target=self._take_over, name="payload-takeover", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _take_over(self) -> None:
        while self._orphans and not self._stopping.is_set():
            self._orphans[0].run()
            if not self._stopping.is_set() or self._orphans[0].idle:
                self._remove(self._orphans[0].outbox)
                self._orphans.popleft()

    def _remove(self, outbox: Outbox) -> None:
        try:
            outbox.remove()
        except OSError as error:
            # The next process ships it again, which changes nothing, and retries the removal.
            self._drops.warn("remove", "the spool %s cannot be removed: %s", outbox.source, error.strerror)
            with contextlib.suppress(OSError):
                outbox.close()

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
        if (own := self._own) is None:
            return self._writer.idle
        deadline = time.monotonic() + timeout_s
        while not (done := self._writer.idle and own.idle and not self._orphans) and time.monotonic() < deadline:
            self._writer.wake()
            own.hurry()
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
        if self._own is not None:
            self._close_spools(self._own, remove=written)
        elif not self._writer.idle:
            self._drops.count(DISK)
        self._drops.whole(at_end=True)

    def _close_spools(self, own: SourceShipper, *, remove: bool) -> None:
        """Ends the threads and releases the spools; `remove` deletes this process's spool if all of it is shipped."""
        self._stopping.set()
        for source in self._sources:
            source.stop()
        for thread in self._threads:
            thread.join(_JOIN_S)
        if self._channel is not None:
            self._channel.close()
        if any(thread.is_alive() for thread in self._threads):
            return  # The disk hangs: the kernel releases the locks when the process ends.
        for orphan in self._orphans:
            orphan.outbox.close()
        if remove and own.idle:
            self._remove(own.outbox)
        else:
            own.outbox.close()
