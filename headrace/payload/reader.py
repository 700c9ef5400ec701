"""Reads the records of an outbox in order; belongs to one thread."""

import logging
from collections.abc import Callable

from headrace.payload.encoding import INCOMPLETE
from headrace.payload.frames import BEGIN, WHOLE, Frame, frames
from headrace.payload.outbox import Outbox, Segment
from headrace_protos.headrace_pb2 import PayloadRecord

logger = logging.getLogger(__name__)

_ABORTED = 1 << 62  # Added to the number of its begin, it is the sequence of a record that has not ended.


class OutboxReader:
    """Reads the records of an outbox in order; `aborts`: then those that have not ended."""

    def __init__(self, outbox: Outbox, hop: str, damaged: Callable[[], None], aborts: bool) -> None:
        self.segment = 0  # Read so far.
        self._segment: Segment | None = None
        self._data = b""
        self._base = 0  # The offset of `_data` in the segment.
        self._at = 0
        self._outbox = outbox
        self._hop = hop
        self._damaged = damaged
        self._aborts = aborts
        self._open: dict[bytes, tuple[int, int, bytearray]] = {}  # Segment, number, parts.

    @property
    def needed(self) -> int:
        """The first segment that is needed to read on, or to read it all again."""
        opened = min((segment for segment, _, _ in self._open.values()), default=self.segment)
        return min(opened, self.segment) if self._aborts else min(self._outbox.needed, self.segment)

    def next(self) -> tuple[int, Frame] | None:
        """The next record with its segment, if there is one."""
        while (found := self._next_here()) is None:
            following = next((one for one in tuple(self._outbox.segments) if one.number > self.segment), None)
            if following is None:
                return self._abort() if self._aborts and self._open else None
            if (found := self._next_here()) is not None:  # A segment that another one follows grows no more.
                break
            self.segment, self._segment, self._at, self._base, self._data = following.number, following, 0, 0, b""
        return found

    def _load(self, segment: Segment) -> bool:
        """Reads on in a segment; returns whether there is more of it."""
        if self._at == segment.used:
            return False
        try:
            self._base, self._data = self._at, segment.read(self._at)
        except OSError as error:
            logger.warning("%s cannot be read: %s", segment.path, error.strerror)
            self._base, self._data, self._at = segment.used, b"", segment.used
            self._lose()
        return bool(self._data)

    def _next_here(self) -> tuple[int, Frame] | None:
        segment = self._segment
        if segment is None or (self._at == self._base + len(self._data) and not self._load(segment)):
            return None
        is_last, end = self._aborts and self.segment == self._outbox.newest, len(self._data)
        for following, frame in frames(self._data, self._at - self._base, end, is_last):
            following += self._base
            self._at = following
            if frame is None:
                logger.warning("%s is damaged before byte %d", segment.path, following)
                self._lose()
            elif frame.kind == WHOLE:
                self._open.pop(frame.record_id, None)
                return self.segment, frame
            elif self._aborts and frame.kind == BEGIN:
                self._open.pop(frame.record_id, None)  # A copy: numbers ascend, as acknowledgements count on it.
                self._open[frame.record_id] = (self.segment, frame.number, bytearray(frame.contents))
            elif self._aborts and (opened := self._open.get(frame.record_id)) is not None:
                opened[2].extend(frame.contents)
        self._at = self._base + end
        return None

    def _lose(self) -> None:
        """Any record that is open may have lost a part."""
        self._damaged()
        for *_, parts in self._open.values():
            parts += INCOMPLETE

    def _abort(self) -> tuple[int, Frame]:
        """Ends the first record that has not ended, whose process has."""
        record_id, (segment, number, parts) = next(iter(self._open.items()))
        del self._open[record_id]
        record = PayloadRecord.FromString(bytes(parts))
        record.status, record.failed_hop = "ABORTED", self._hop
        record.message = "the service ended before the answer did"
        if record.chunks:
            record.duration_ms = record.chunks[-1].offset_ms
        return segment, Frame(WHOLE, _ABORTED + number, record_id, record.SerializeToString())
