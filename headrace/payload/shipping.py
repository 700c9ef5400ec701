"""Two threads: one ships this process's spool, the other the spools of ended processes, one after the other.

A spool of an ended process is removed once the logger has all its records. Only the owner's thread calls `start` and
`close`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import grpc

from headrace.payload.drops import Drops
from headrace.payload.outbox import Outbox
from headrace.payload.shipper import AppendCall, SourceShipper
from headrace.rpc.client.channel import channel_options
from headrace_protos.headrace_pb2 import AppendResponse

_APPEND = "/headrace.v1.PayloadIngest/Append"
_JOIN_S = 1.0
# A logger that is stopped but not dead keeps its connection: only a ping detects it.
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 10.0, 5.0


class PayloadShipping:
    """Owns the threads and the channel to the logger at `target`, and holds the outboxes until `close`.

    `own` ships this process's spool. `freed` is called when room has become free.
    """

    def __init__(
        self, target: str, own: Outbox, orphans: Sequence[Outbox], drops: Drops, hop: str, freed: Callable[[], None]
    ) -> None:
        self._drops = drops
        self._stopping = threading.Event()
        # Neither traced nor recorded: the channel belongs to no request.
        self._channel = grpc.insecure_channel(target, options=channel_options(_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S))
        append: AppendCall = self._channel.stream_stream(_APPEND, response_deserializer=AppendResponse.FromString)
        self.own = SourceShipper(append, target, own, drops, hop, freed, ends=False)
        self._orphans = deque(SourceShipper(append, target, orphan, drops, hop, freed, ends=True) for orphan in orphans)
        self._threads = [
            threading.Thread(target=self.own.run, name="payload-shipper", daemon=True),
            threading.Thread(target=self._take_over, name="payload-takeover", daemon=True),
        ]

    @property
    def unacknowledged(self) -> int:
        """How many records were sent that the logger has yet to commit."""
        return sum(source.unacknowledged for source in (self.own, *self._orphans))

    @property
    def oldest_s(self) -> float:
        """Time since the end of the oldest record that the logger has yet to commit; 0 if there is none.

        Spools that wait until another one is shipped are not included.
        """
        return max(source.oldest_s for source in (self.own, *self._orphans))

    @property
    def idle(self) -> bool:
        """Whether the logger has every record that has ended."""
        return self.own.idle and not self._orphans

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, *, remove: bool) -> None:
        """Ends the threads and releases the spools; `remove` deletes this process's spool if all of it is shipped."""
        self._stopping.set()
        for source in (self.own, *self._orphans):
            source.stop()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._channel.close()
        if any(thread.is_alive() for thread in self._threads):
            return  # The disk hangs: the kernel releases the locks when the process ends.
        for orphan in self._orphans:
            orphan.outbox.close()
        if remove and self.own.idle:
            self._remove(self.own.outbox)
        else:
            self.own.outbox.close()

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
