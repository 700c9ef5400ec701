"""The spool: records on disk until the logger has committed them.

    ROOT/lock                     held during a search for folders without an owner
    ROOT/UUID/lock                held (flock) by the process that owns the folder; the UUID is the source
    ROOT/UUID/NUMBER.segment      frames (outbox/segments.py); NUMBER, of 20 digits, is the first frame's
    ROOT/UUID/journal             begins of records that are not in a segment yet (outbox/journal.py)
    ROOT/UUID/reserve             zeros: room that is kept on a disk which other programs may fill

Frames are numbered from 1 without gaps.

A process appends only to its new folder, and takes over folders without an owner to read them to their end. So no frame
is ever written after the remains of a crash, and no number is used twice.

One thread appends to a spool, another one reads and deletes; both may use any method. Errors are OSError; a failed
append leaves no frame behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import StartupError
from headrace.payload.outbox.journal import Journal, read_journal
from headrace.payload.outbox.segments import Segment, header

logger = logging.getLogger(__name__)

_SEGMENT_NAME = re.compile(r"\d{20}\.segment")
_MAX_SEGMENT_BYTES = 8 << 20
_SEGMENTS = 8  # The least in a full spool: space is freed one segment at a time.
_ROOT_WAIT_S = 5.0
_UNKNOWN = 1 << 62
_RESERVE = "reserve"
_RESERVE_BYTES = 64 << 10
_JOURNAL = "journal"


class Spool:
    """One source's folder, held by this process until `close` or `remove`; a new one without `taken_over`."""

    def __init__(
        self, folder: Path, lock: int, segment_bytes: int, fsync: bool, taken_over: Sequence[Segment] | None = None
    ) -> None:
        segments = taken_over or ()
        self.source = folder.name
        self.size = sum(segment.size for segment in segments)
        self.segment_bytes = segment_bytes
        self._folder = folder
        self._held = lock
        self._segments = list(segments)
        self._fsync = fsync
        # The number of the next frame. In a spool that is taken over it is unknown: the last segment is not read yet.
        self._next = 1 if taken_over is None else _UNKNOWN
        self._file: int | None = None  # Of the newest segment, while frames may be appended to it.
        self._reserved = False
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._fails = False  # Whether the last append failed.

    @property
    def next_number(self) -> int:
        """The number that the next frame gets."""
        return self._next

    @property
    def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        with self._lock:
            return list(self._segments)

    def path(self, segment: Segment) -> Path:
        """The file of a segment."""
        return self._folder / f"{segment.first:020d}.segment"

    @property
    def journal(self) -> Journal | None:
        """The journal, while the disk works; None with `fsync`, which it does not fulfil."""
        return None if self._fails else self._journal

    def open_journal(self) -> None:
        """Creates the journal; without room on the disk there is none."""
        if not self._fsync:
            with contextlib.suppress(OSError):
                self._journal = Journal(self._folder / _JOURNAL)

    def journaled(self) -> list[bytes]:
        """The frames in the journal of a spool that is taken over; some may be in the segments too."""
        return read_journal(self._folder / _JOURNAL)

    def append(self, payloads: Sequence[bytes]) -> None:
        """Appends frames, all or none."""
        with self._lock:
            self._append(payloads)

    def append_at(self, number: int, payloads: Sequence[bytes]) -> bool:
        """Appends frames if the first one gets this number; returns whether it did."""
        with self._lock:
            if self._next != number:
                return False
            self._append(payloads)
            return True

    def reserve(self) -> bool:
        """Keeps room on the disk until `release_reserve`; returns whether it is kept."""
        if not self._reserved:
            path = self._folder / _RESERVE
            try:
                path.write_bytes(bytes(min(_RESERVE_BYTES, self.segment_bytes)))
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()
                return False
            self._reserved = True
        return True

    def release_reserve(self) -> bool:
        """Frees the room that `reserve` keeps; returns whether it kept any."""
        was_reserved, self._reserved = self._reserved, False
        if was_reserved:
            (self._folder / _RESERVE).unlink(missing_ok=True)
        return was_reserved

    def delete_before(self, number: int) -> None:
        """Deletes the segments whose frames all have smaller numbers, except the one that is being written."""
        while (segment := self._drop_oldest(number)) is not None:
            self.path(segment).unlink(missing_ok=True)

    def end_segment(self) -> None:
        """Makes the next frame begin a new segment, so that the newest one can be deleted too."""
        with self._lock:
            self._close_file()

    def close(self) -> None:
        """Releases the folder; the next process may take it over."""
        self.end_segment()
        os.close(self._held)

    def remove(self) -> None:
        """Deletes the folder and its contents."""
        self.end_segment()
        with _locked(self._folder.parent):
            for segment in self.segments:
                self.path(segment).unlink(missing_ok=True)
            _remove_empty(self._folder, self._held)
        with self._lock:
            self._segments.clear()
            self.size = 0

    def _append(self, payloads: Sequence[bytes]) -> None:
        try:
            self._append_all(payloads)
        except OSError:
            self._fails = True
            raise
        self._fails = False

    def _append_all(self, payloads: Sequence[bytes]) -> None:
        data = b"".join(part for payload in payloads for part in (header(payload), payload))
        file = self._file_to_append_to()
        try:
            _write(file, data)
            if self._fsync:
                os.fsync(file)
        except OSError:
            self._cut_back(file)
            raise
        self._segments[-1] = Segment(self._segments[-1].first, self._segments[-1].size + len(data))
        self.size += len(data)
        self._next += len(payloads)

    def _file_to_append_to(self) -> int:
        if self._file is not None and self._segments[-1].size >= self.segment_bytes:
            self._close_file()
        if self._file is None:
            segment = Segment(self._next, 0)
            self._file = os.open(self.path(segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._segments.append(segment)
        return self._file

    def _cut_back(self, file: int) -> None:
        """Removes the remains of a failed append, and ends the segment: it can be deleted once it is shipped."""
        segment = self._segments[-1]
        with contextlib.suppress(OSError):  # Then a torn frame stays at its end, where readers stop.
            os.ftruncate(file, segment.size)
        self._close_file()
        if segment.size == 0:
            self._segments.pop()
            with contextlib.suppress(OSError):
                self.path(segment).unlink()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _drop_oldest(self, number: int) -> Segment | None:
        with self._lock:
            if not self._segments or (len(self._segments) == 1 and self._file is not None):
                return None
            end = self._segments[1].first if len(self._segments) > 1 else self._next
            if end > number:
                return None
            segment = self._segments.pop(0)
            self.size -= segment.size
            return segment


def open_spools(root: Path, max_bytes: int, fsync: bool = False) -> tuple[Spool, list[Spool]]:
    """A new spool to append to, and the spools without an owner; raises StartupError if `root` cannot be used."""
    segment_bytes = min(_MAX_SEGMENT_BYTES, max(1, max_bytes // _SEGMENTS))
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root):
            folders = sorted(root.iterdir())
            own = _create(root / str(uuid.uuid4()), segment_bytes, fsync)
            return own, [orphan for folder in folders if (orphan := _take_over(folder, segment_bytes)) is not None]
    except OSError as error:
        raise StartupError(f"the spool folder {root} cannot be used: {error.strerror}; name another one") from None


def _create(folder: Path, segment_bytes: int, fsync: bool) -> Spool:
    folder.mkdir(mode=0o700)
    try:
        lock = _lock_file(folder)
    except OSError:
        folder.rmdir()
        raise
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    spool = Spool(folder, lock, segment_bytes, fsync)
    spool.reserve()
    spool.open_journal()
    return spool


def _take_over(folder: Path, segment_bytes: int) -> Spool | None:
    """The spool in a folder without an owner; an empty folder is removed."""
    if not _is_uuid(folder.name) or not folder.is_dir():
        return None
    try:
        lock = _lock_file(folder)
    except OSError as error:
        logger.warning("the spool %s cannot be taken over: %s", folder, error.strerror)
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    (folder / _RESERVE).unlink(missing_ok=True)
    paths = sorted(path for path in folder.iterdir() if _SEGMENT_NAME.fullmatch(path.name))
    segments = [Segment(int(path.stem), path.stat().st_size) for path in paths]
    if not any(segment.size for segment in segments) and not read_journal(folder / _JOURNAL):
        for path in paths:
            path.unlink()
        _remove_empty(folder, lock)
        return None
    return Spool(folder, lock, segment_bytes, fsync=False, taken_over=segments)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Locks the root against other processes; raises BlockingIOError if it stays locked for `_ROOT_WAIT_S`."""
    lock = _lock_file(root)
    deadline = time.monotonic() + _ROOT_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(lock)


def _lock_file(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)


def _remove_empty(folder: Path, lock: int) -> None:
    for name in (_RESERVE, _JOURNAL, "lock"):
        (folder / name).unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):  # The folder holds a foreign file.
        folder.rmdir()


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
