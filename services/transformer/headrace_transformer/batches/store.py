"""The folder of files and batches. Several processes may share it; every method may block.

    batches.db  the states of files and batches (SQLite)
    files/ID    the contents of a file; what is beyond its size in the database was not committed
    running/ID  of an unfinished batch: who runs it holds its flock, which ends with the process

Contents are written before the transaction that counts them, and removed before the one that forgets them, so that
transactions are short and a full disk can be emptied. The database keeps a rollback journal rather than a write-ahead
log, whose shared memory no network file system has. A client sees what is its own, an admin all. Without keys there is
one client, whose name is empty.
"""

import fcntl
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from headrace.clients import Client
from headrace.errors import InvalidRequestError, OverloadedError, may_pass
from headrace_transformer.batches.objects import Batch, Result, StoredFile, new_id
from headrace_transformer.frontends.openai.errors import NoSuchObjectError

MAX_FILES = 10_000  # Of one client.
MAX_BATCHES = 10_000
_DAY_S = 86_400
_UNKNOWN_S = 3600  # After which a file that the database does not know goes; one that is being added is younger.
_BUSY_S = 5.0
_READ_BYTES = 256 * 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, size INTEGER NOT NULL,
    created_at INTEGER NOT NULL, is_listed INTEGER NOT NULL  -- The results of a batch are, once it is final.
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, state TEXT NOT NULL, is_final INTEGER NOT NULL, changed_at REAL NOT NULL,
    cancelled_at REAL
);
"""
_VISIBLE = "(client = :client OR :is_admin)"


class Limits(NamedTuple):
    """What the folder holds: bytes of files, unfinished batches of each client, days after which results go."""

    max_bytes: int
    batches_per_client: int
    days: int


class Store:
    """See the module. Raises HeadraceError; OverloadedError where the disk is full or others take too long."""

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._has_tables = False

    # ------------------------------------------------------------------ files

    def add_file(self, client: Client, filename: str, purpose: str, contents: bytes) -> StoredFile:
        """Keeps a file; raises OverloadedError where the folder is full."""
        row = (new_id("file-"), client.name, filename, purpose, len(contents), int(self._clock()), True)
        with self._sql() as sql:
            self._check_room(sql, client, len(contents))
        try:
            self._write(row[0], 0, [contents])
            with self._sql(writes=True) as sql:
                self._check_room(sql, client, len(contents))
                sql.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        except BaseException:
            with suppress(OSError):  # Then it goes later, as unknown.
                self._path(row[0]).unlink()
            raise
        return self._stored(row)

    def file(self, client: Client, file_id: str) -> StoredFile:
        with self._sql() as sql:
            return self._file(sql, client, file_id)

    def files(self, client: Client, purpose: str, after: str, limit: int, newest_first: bool) -> list[StoredFile]:
        """The client's files after one, one more than `limit`, so that it is known whether there are more."""
        following, order = ("id < :after", "DESC") if newest_first else ("id > :after", "ASC")
        query = (
            f"SELECT * FROM files WHERE is_listed AND {_VISIBLE} AND :purpose IN ('', purpose)"  # noqa: S608
            f" AND (:after = '' OR {following}) ORDER BY id {order} LIMIT :limit + 1"
        )
        with self._sql() as sql:
            rows = sql.execute(query, _seen_by(client, purpose=purpose, after=after, limit=limit))
            return [self._stored(row) for row in rows]

    def contents(self, client: Client, file_id: str) -> Iterator[bytes]:
        """The contents of a file, in pieces; each step may block."""
        self.file(client, file_id)
        yield from self.pieces(file_id)

    def pieces(self, file_id: str) -> Iterator[bytes]:
        """A file in pieces that end with a line, whole even if it is deleted meanwhile; raises NoSuchObjectError."""
        left = self.size(file_id)
        with _refusing_when_full():
            try:
                file = self._path(file_id).open("rb")
            except FileNotFoundError:
                raise _no_file(file_id) from None
            with file:
                while left:
                    piece = file.read(min(_READ_BYTES, left))
                    piece += file.readline(left - len(piece))
                    if not piece:
                        raise _no_file(file_id)
                    left -= len(piece)
                    yield piece

    def delete_file(self, client: Client, file_id: str) -> None:
        """Deletes a file; raises InvalidRequestError if an unfinished batch needs it."""
        needs = "SELECT id FROM batches WHERE NOT is_final AND json_extract(state, '$.input_file_id') = ?"
        with self._sql(writes=True) as sql:
            self._file(sql, client, file_id)
            for (batch_id,) in sql.execute(needs, (file_id,)):
                raise InvalidRequestError(f"the batch {batch_id} needs the file; cancel the batch first")
            self._delete(sql, file_id)

    # ------------------------------------------------------------------ batches

    def create_batch(self, client: Client, batch: Batch) -> None:
        """Adds a batch; raises NoSuchObjectError without its file, and OverloadedError beyond a limit."""
        with self._sql(writes=True) as sql:
            if self._file(sql, client, batch.input_file_id).purpose != "batch":
                raise InvalidRequestError("the file's purpose must be batch", param="input_file_id")
            own = "SELECT count(*) FROM files WHERE id = ? AND client = ?"
            if not _number(sql, own, batch.input_file_id, client.name):
                raise InvalidRequestError("the file is another client's", param="input_file_id")
            in_progress = _number(sql, "SELECT count(*) FROM batches WHERE client = ? AND NOT is_final", client.name)
            if in_progress >= self._limits.batches_per_client:
                raise OverloadedError(f"{in_progress} batches are in progress, no more are allowed at once")
            if _number(sql, "SELECT count(*) FROM batches WHERE client = ?", client.name) >= MAX_BATCHES:
                raise OverloadedError(f"{MAX_BATCHES} batches are kept; the oldest go after {self._limits.days} days")
            now = self._clock()
            state = (batch.id, batch.client, batch.model_dump_json(), False, now)
            sql.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, NULL)", state)
            for file_id in batch.result_file_ids:
                name = f"{batch.id}_{file_id.rpartition('-')[2]}.jsonl"
                row = (file_id, batch.client, name, "batch_output", 0, int(now), False)
                sql.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def batch(self, client: Client, batch_id: str) -> Batch:
        with self._sql() as sql:
            return self._batch(sql, client, batch_id)

    def batches(self, client: Client, after: str, limit: int) -> list[Batch]:
        """The client's batches after one, the newest first, one more than `limit`."""
        query = (
            f"SELECT state, cancelled_at FROM batches WHERE {_VISIBLE} AND (:after = '' OR id < :after)"  # noqa: S608
            " ORDER BY id DESC LIMIT :limit + 1"
        )
        with self._sql() as sql:
            return [_shown(*row) for row in sql.execute(query, _seen_by(client, after=after, limit=limit))]

    def cancel(self, client: Client, batch_id: str) -> Batch:
        """Requests the cancellation of a batch; raises InvalidRequestError if it has ended."""
        request = "UPDATE batches SET cancelled_at = coalesce(cancelled_at, ?) WHERE id = ?"
        with self._sql(writes=True) as sql:
            batch = self._batch(sql, client, batch_id)
            if batch.is_final:
                raise InvalidRequestError(f"the batch is {batch.status}: it cannot be cancelled")
            sql.execute(request, (self._clock(), batch_id))
            return self._batch(sql, client, batch_id)

    # ------------------------------------------------------------------ for who runs batches

    def unfinished(self) -> list[tuple[str, str]]:
        """The batches that are not final, by id and client, the oldest first."""
        with self._sql() as sql:
            return sql.execute("SELECT id, client FROM batches WHERE NOT is_final ORDER BY id").fetchall()

    def take(self, batch_id: str) -> tuple[Batch, IO[str]] | None:
        """An unfinished batch, and a file whose lock this process has until it closes it; None if another has it."""
        path = self._running(batch_id)
        path.parent.mkdir(exist_ok=True)
        lock = path.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._sql() as sql:
                row = sql.execute("SELECT state FROM batches WHERE id = ? AND NOT is_final", (batch_id,)).fetchone()
            if row is not None:
                return Batch.model_validate_json(row[0]), lock
            path.unlink(missing_ok=True)  # It was final meanwhile.
        except BlockingIOError:
            pass
        except BaseException:
            lock.close()
            raise
        lock.close()
        return None

    def save(self, batch: Batch, results: Iterable[Result] = ()) -> None:
        """Replaces the state of a batch, and adds results to its files: all of it, or nothing."""
        lines = defaultdict[str, list[bytes]](list)
        for result in results:
            lines[batch.error_file_id if result.is_error else batch.output_file_id].append(result.line(batch.id))
        sizes = [(self._write(file_id, self.size(file_id), those), file_id) for file_id, those in lines.items()]
        with self._sql(writes=True) as sql:
            _save(sql, batch, self._clock())
            sql.executemany("UPDATE files SET size = ? WHERE id = ?", sizes)

    def done(self, batch: Batch) -> set[str]:
        """The custom_ids of the lines with a result."""
        pieces = (piece for file_id in batch.result_file_ids if self.size(file_id) for piece in self.pieces(file_id))
        return {orjson.loads(line)["custom_id"] for piece in pieces for line in piece.split(b"\n") if line}

    def finish(self, batch: Batch) -> None:
        """Saves a batch that is final, and makes its results files of the client."""
        now = self._clock()
        with self._sql(writes=True) as sql:
            _save(sql, batch, now)
            listing = "UPDATE files SET is_listed = size > 0, created_at = ? WHERE id IN (?, ?)"
            sql.execute(listing, (int(now), *batch.result_file_ids))
            sql.execute("DELETE FROM files WHERE id IN (?, ?) AND NOT is_listed", batch.result_file_ids)
        self._running(batch.id).unlink(missing_ok=True)

    def size(self, file_id: str) -> int:
        """Bytes of a file; raises NoSuchObjectError."""
        with self._sql() as sql:
            row = sql.execute("SELECT size FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None:
            raise _no_file(file_id)
        return int(row[0])

    def is_cancelled(self, batch: Batch) -> bool:
        with self._sql() as sql:
            return bool(_number(sql, "SELECT cancelled_at IS NOT NULL FROM batches WHERE id = ?", batch.id))

    def remove_old(self) -> None:
        """Removes files, and final batches, that are older than the days for which they are kept."""
        oldest = self._clock() - self._limits.days * _DAY_S
        old = (
            "SELECT id FROM files WHERE is_listed AND created_at < ? AND id NOT IN"
            " (SELECT json_extract(state, '$.input_file_id') FROM batches WHERE NOT is_final)"
        )
        with self._sql(writes=True) as sql:
            for (file_id,) in sql.execute(old, (oldest,)).fetchall():
                self._delete(sql, file_id)
            sql.execute("DELETE FROM batches WHERE is_final AND changed_at < ?", (oldest,))
            known = {file_id for (file_id,) in sql.execute("SELECT id FROM files")}
        for path in self._path("").glob("*"):
            with suppress(FileNotFoundError):  # Others remove them, too.
                if path.name not in known and path.stat().st_mtime < time.time() - _UNKNOWN_S:
                    path.unlink()

    # ------------------------------------------------------------------

    @contextmanager
    def _sql(self, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection of its own, with a transaction if it writes, which an exception rolls back."""
        path = self._folder / "batches.db"
        with _refusing_when_full(), closing(sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)) as sql:
            sql.executescript("PRAGMA synchronous = EXTRA; PRAGMA secure_delete = ON")
            if not self._has_tables:
                sql.executescript(_TABLES)
                self._has_tables = True
            if writes:
                sql.execute("BEGIN IMMEDIATE")
            yield sql
            if writes:
                sql.execute("COMMIT")

    def _file(self, sql: sqlite3.Connection, client: Client, file_id: str) -> StoredFile:
        query = f"SELECT * FROM files WHERE id = :id AND is_listed AND {_VISIBLE}"  # noqa: S608
        row = sql.execute(query, _seen_by(client, id=file_id)).fetchone()
        if row is None:
            raise _no_file(file_id)
        return self._stored(row)

    def _stored(self, row: tuple[Any, ...]) -> StoredFile:
        file_id, _, filename, purpose, size, created_at, _ = row
        expires_at = created_at + self._limits.days * _DAY_S
        return StoredFile(file_id, filename, purpose, size, created_at, expires_at)

    def _batch(self, sql: sqlite3.Connection, client: Client, batch_id: str) -> Batch:
        query = f"SELECT state, cancelled_at FROM batches WHERE id = :id AND {_VISIBLE}"  # noqa: S608
        row = sql.execute(query, _seen_by(client, id=batch_id)).fetchone()
        if row is None:
            raise NoSuchObjectError(f"there is no batch {batch_id[:64]!r}")
        return _shown(*row)

    def _check_room(self, sql: sqlite3.Connection, client: Client, size: int) -> None:
        """Refuses a file beyond the limits; a client with a key may have half of the folder's bytes."""
        most = self._limits.max_bytes
        own = _number(sql, "SELECT total(size) FROM files WHERE client = ?", client.name)
        every = _number(sql, "SELECT total(size) FROM files")
        if every + size > most or (client.name and own + size > most // 2):
            raise OverloadedError(
                f"the folder of batches is full, it has {most} bytes: delete files that are no longer needed"
            )
        if _number(sql, "SELECT count(*) FROM files WHERE client = ? AND is_listed", client.name) >= MAX_FILES:
            raise OverloadedError(f"there are {MAX_FILES} files: delete those that are no longer needed")

    def _write(self, file_id: str, size: int, contents: Iterable[bytes]) -> int:
        """Appends to the first bytes of a file, which may be new, and to the disk; its new size."""
        path = self._path(file_id)
        with _refusing_when_full():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("r+b" if size else "wb") as file:
                file.seek(size)
                file.writelines(contents)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
                written = file.tell()
            if not size:
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)  # The name.
                finally:
                    os.close(folder)
        return written

    def _delete(self, sql: sqlite3.Connection, file_id: str) -> None:
        self._path(file_id).unlink(missing_ok=True)
        sql.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def _path(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    def _running(self, batch_id: str) -> Path:
        return self._folder / "running" / batch_id


@contextmanager
def _refusing_when_full() -> Iterator[None]:
    """Makes OverloadedError of a disk that is full or read-only, and of a database that is locked for too long."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not may_pass(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise OverloadedError(f"the disk of the folder of batches: {reason}; nothing was kept") from None


def _seen_by(client: Client, **others: Any) -> dict[str, Any]:
    """The parameters of _VISIBLE, and others."""
    return {"client": client.name, "is_admin": client.is_admin, **others}


def _number(sql: sqlite3.Connection, query: str, *values: Any) -> int:
    return int(sql.execute(query, values).fetchone()[0])


def _save(sql: sqlite3.Connection, batch: Batch, now: float) -> None:
    values = (batch.model_dump_json(), batch.is_final, now, batch.id)
    sql.execute("UPDATE batches SET state = ?, is_final = ?, changed_at = ? WHERE id = ?", values)


def _shown(state: str, cancelled_at: float | None) -> Batch:
    """A batch as its client sees it."""
    batch = Batch.model_validate_json(state)
    return batch if batch.is_final or cancelled_at is None else batch.entered("cancelling", cancelled_at)


def _no_file(file_id: str) -> NoSuchObjectError:
    return NoSuchObjectError(f"there is no file {file_id[:64]!r}")
