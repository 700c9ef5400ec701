"""The outbox: one process's records on disk until the logger has committed them.

    ROOT/lock                     held during a search for folders without an owner
    ROOT/UUID/lock                held (flock) by the process that owns the folder; the UUID is the source
    ROOT/UUID/NUMBER.segment      frames; NUMBER, of 20 digits, is the segment's

Segments have their whole size from the start and are mapped to memory, so an append is a copy: it needs no thread, no
disk and no call of the system, and what is copied survives the death of the process. Another thread calls `prepare`,
which creates the next segment before it is needed.

A process appends only to its new folder, and takes over folders without an owner to read them to their end.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import StartupError
from headrace.payload.drops import DISK, FULL
from headrace.payload.frames import HEADER_BYTES, header

logger = logging.getLogger(__name__)

_SEGMENT_NAME = re.compile(r"\d{20}\.segment")
_MAX_SEGMENT_BYTES = 1 << 20
_SEGMENTS = 16  # The least in a full outbox: space is freed one segment at a time.
_SMALLER = 16  # A disk without room for a segment may have some for this fraction of one.
_OVER = 16  # The fraction of the maximum by which ends may exceed it.
_ROOT_WAIT_S = 5.0


class Segment:
    """A file of frames, which fill `used` of its bytes; mapped to memory while it is written."""

    def __init__(self, path: Path, size: int, file: int | None = None) -> None:
        self.path = path
        self.number = int(path.stem)
        self.size = size
        self.used = size if file is None else 0
        self.file = file
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.mapped = None if file is None else mmap.mmap(file, size, flags=flags)

    def read(self, at: int) -> bytes:
        """The frames from an offset on; raises OSError."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(at)
            return file.read(self.used - at)

    def close(self) -> None:
        """Ends the writing: thousands of segments may wait, and each mapping has a descriptor."""
        if self.mapped is not None and self.file is not None:
            self.mapped.close()
            os.close(self.file)
            self.mapped = self.file = None


class Outbox:
    """One source's folder, held by this process until `close` or `remove`.

    One thread appends, another one prepares, a third one reads and deletes.
    """

    def __init__(self, folder: Path, lock: int, max_bytes: int, segments: Sequence[Segment] = ()) -> None:
        self.source = folder.name
        self.segments = deque(segments)
        self.needed = 0  # The first segment with a part of a record that has not ended; set by the appending thread.
        self.refusal: str | None = None  # Why the last attempt to prepare a segment failed.
        self.next_number = 1
        self.syncs = False  # Whether a segment is written through to the disk before the next one begins.
        self.segment_bytes = max(1, min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENTS))
        self._folder = folder
        self._held = lock
        self._max_bytes = max_bytes
        self._newest = segments[-1] if segments else Segment(Path("0"), 0)  # The latter is full.
        self._is_closed = False
        self._spares: deque[Segment] = deque()  # What follows; the last one is kept for ends.
        self._is_kept = False  # Whether the newest one is, because there is no room for another.
        self._wanted = (0, False)  # The size of a frame that found no room, and whether it is an end.
        self._last = 0  # The number of the last segment.

    @property
    def newest(self) -> int:
        """The number of the segment that is appended to."""
        return self._newest.number

    @property
    def largest(self) -> int:
        """The most contents that a frame may have."""
        return self._max_bytes // 4

    @property
    def size(self) -> int:
        """The size of the frames on disk."""
        return sum(segment.used for segment in tuple(self.segments))

    def append(self, kind: int, record_id: bytes, contents: bytes, is_end: bool = False) -> bool:
        """Appends a frame; False if there is no room: then `refusal` has the reason, or there will be room soon.

        `is_end`: of a record that has begun; room is kept for it, also above the maximum and on a full disk.
        """
        size = HEADER_BYTES + len(contents)
        mapped = self._newest.mapped
        if mapped is None or self._newest.used + size > self._newest.size or (self._is_kept and not is_end):
            mapped = self._next_segment(size, is_end)
        if mapped is None:
            return False
        at = self._newest.used
        # Contents first: without its header a frame is not there, should the process die meanwhile.
        mapped[at + HEADER_BYTES : at + size] = contents
        mapped[at : at + HEADER_BYTES] = header(kind, self.next_number, record_id, contents)
        self._newest.used = at + size
        self.next_number += 1
        return True

    def sync(self) -> None:
        """Writes the newest segment through to the disk."""
        if self._newest.file is not None:
            os.fdatasync(self._newest.file)

    def prepare(self, others_bytes: int) -> None:
        """Creates the segments that are missing; `others_bytes` is the size of other outboxes within the maximum."""
        (wanted, is_end), self._wanted = self._wanted, (0, False)
        refusal = self._prepare(wanted, is_end, others_bytes)
        if refusal is not None and wanted:
            self._prepare(0, False, others_bytes)  # Smaller frames go on.
        self.refusal = refusal

    def delete_before(self, number: int) -> bool:
        """Deletes the segments before one, except the newest; returns whether there were any."""
        deleted = False
        while len(self.segments) > 1 and self.segments[0].number < number:
            segment = self.segments[0]
            segment.path.unlink(missing_ok=True)
            self.segments.popleft()
            deleted = True
        return deleted

    def close(self) -> None:
        """Releases the folder; the next process may take it over. A disk may still be busy with a segment."""
        self._is_closed = True
        self._newest.close()
        for segment in tuple(self._spares):
            segment.close()
            segment.path.unlink(missing_ok=True)
        os.close(self._held)

    def remove(self) -> None:
        for segment in (self._newest, *self._spares):
            segment.close()
        with _locked(self._folder.parent):
            _remove(self._folder, self._held)
        self.segments.clear()

    def _prepare(self, wanted: int, is_end: bool, others_bytes: int) -> str | None:
        """Creates a segment for a frame of this size, and another one to keep; returns why it cannot."""
        while True:
            spares = tuple(self._spares)
            at = _fitting(spares, wanted)
            if at + 1 < len(spares):
                return None
            taken = sum(segment.size for segment in (*self.segments, *spares)) + others_bytes
            needed = wanted if at == len(spares) else 0
            most = self._max_bytes
            if is_end or needed <= self.segment_bytes:
                most += most // _OVER
            least = max(1, needed, self.segment_bytes // _SMALLER)
            if taken + least > most or (not needed and spares and taken > self._max_bytes):
                return FULL
            if not (self._create(max(least, min(self.segment_bytes, most - taken))) or self._create(least)):
                return DISK

    def _create(self, size: int) -> bool:
        self._last += 1
        path = self._folder / f"{self._last:020d}.segment"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(file, 0, size)
                if self._is_closed:
                    raise OSError("closed meanwhile")
                self._spares.append(Segment(path, size, file))
            except OSError:
                os.close(file)
                path.unlink()
                raise
        except OSError as error:
            logger.debug("a segment of %d bytes: %s", size, error)
            return False
        return True

    def _next_segment(self, size: int, is_end: bool) -> mmap.mmap | None:
        """Goes on in a segment that is prepared; None if there is none for a frame of this size."""
        spares = tuple(self._spares)
        at = _fitting(spares, size)
        takes_kept = is_end and self.refusal is not None
        if at + 1 > len(spares) - (not takes_kept):
            if is_end or self.refusal is None:
                self._wanted = max(self._wanted, (size, is_end))
            return None
        if self.syncs:
            self.sync()
        # Their numbers are the order in which they are read: earlier ones stay empty.
        for _ in range(at + 1):
            self._newest.close()
            self._newest = self._spares.popleft()
            self.segments.append(self._newest)
        self._is_kept = not self._spares
        return self._newest.mapped


def _fitting(spares: Sequence[Segment], size: int) -> int:
    """The index of the first segment for a frame of this size; their number if there is none."""
    return next((at for at, spare in enumerate(spares) if size <= spare.size), len(spares))


def open_outboxes(root: Path, max_bytes: int) -> tuple[Outbox, list[Outbox]]:
    """A new outbox to append to, and those without an owner; raises StartupError if `root` cannot be used."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root):
            folders = sorted(root.iterdir())
            own = _create_folder(root / str(uuid.uuid4()), max_bytes)
            orphans = [orphan for folder in folders if (orphan := _take_over(folder, max_bytes)) is not None]
    except OSError as error:
        raise StartupError(f"the spool folder {root} cannot be used: {error.strerror}; name another one") from None
    own.prepare(sum(orphan.size for orphan in orphans))
    return own, orphans


def _create_folder(folder: Path, max_bytes: int) -> Outbox:
    folder.mkdir(mode=0o700)
    try:
        lock = _lock_file(folder)
    except OSError:
        folder.rmdir()
        raise
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Outbox(folder, lock, max_bytes)


def _take_over(folder: Path, max_bytes: int) -> Outbox | None:
    """The outbox in a folder without an owner; an empty folder is removed."""
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
    found = sorted(folder.iterdir())
    paths = [path for path in found if _SEGMENT_NAME.fullmatch(path.name)]
    if others := [path.name for path in found if path not in paths and path.name != "lock"]:
        logger.warning("the spool %s has %s, which this version does not read", folder, others[0])
    while paths and _is_unused(paths[-1]):
        paths.pop()
    if segments := [Segment(path, size) for path in paths if (size := path.stat().st_size)]:
        return Outbox(folder, lock, max_bytes, segments)
    _remove(folder, lock)
    return None


def _is_unused(path: Path) -> bool:
    """Whether a segment was only prepared."""
    try:
        return not path.read_bytes().strip(b"\0")
    except OSError:
        return False  # Its reader counts it.


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


def _remove(folder: Path, lock: int) -> None:
    for path in folder.iterdir():
        if _SEGMENT_NAME.fullmatch(path.name):
            path.unlink()
    (folder / "lock").unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):  # The folder holds a foreign file.
        folder.rmdir()


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False
