"""Where payload records lie.

`Store` is what the logger's services need; `SqliteStore` is the embedded one, in the file that schema.py describes.
`append` returns after the commit; a (source, sequence) or record_id that has come before changes nothing, deleted or
not. What is read is newest first, by the records' times, but for `after`, which reads in the order of commit. A call
that a service answered is not shown without the service's record while that may be on its way.

Threads: all writes happen on one thread, reads on a few others, none on the event loop. A query reads some records at a
time, in a transaction of its own, and holds none while its reader takes its time. Whatever could take long (deleting,
giving back space) is done in small steps, between which others write.

If the database's files are removed, a new database is created, and what was written to the old one is not acknowledged.

Errors: StartupError where the file cannot be used, NotReadyError where the database stops answering,
InvalidRequestError for a page token that is none, DeadlineError where a search for text takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DatabaseError

from millrace.errors import NotReadyError, StartupError
from millrace_protos.millrace_pb2 import AppendRequest, PayloadRecord
from services.logger.store import reading, removing, schema, writing
from services.logger.store.deletions import Deletions
from services.logger.store.filters import Filters
from services.logger.store.readers import FREE_BYTES, Lender
from services.logger.store.reading import Found, Place, Row
from services.logger.telemetry import Commits

logger = logging.getLogger(__name__)

SEARCH_S = 5.0

_READERS = 4
_ROWS_PER_READ = 100
_BYTES_PER_READ = 16 * 1024 * 1024
_BYTES_PER_BATCH = 1024 * 1024

T = TypeVar("T")


class Stored(NamedTuple):
    """A record and its place in the order of commit."""

    position: int
    record: PayloadRecord


class _Batch(NamedTuple):
    """Rows of a query, what each holds that passes the filters, and whether others follow."""

    rows: Sequence[Row]
    found: Sequence[Found | None]
    is_followed: bool


class Store(Protocol):
    """Payload records by key, by filter and in the order of commit."""

    async def append(self, requests: Sequence[AppendRequest]) -> list[PayloadRecord]:
        """Commits the records, all or none, and returns the new ones; those that are there already stay as they are."""
        ...

    async def add_calls(self, calls: Sequence[PayloadRecord], reached: Collection[str] = ()) -> list[PayloadRecord]:
        """Commits what the gateway said of calls: records of which `gateway` is set, and `call_id` where it has one.

        The call is joined to the services' records that name its call_id. Where there is none it is a record of its
        own, until one comes; these are returned. `reached` has the record_ids of those that a service may record.
        """
        ...

    def get(self, record_id: str, lender: Lender | None = None) -> AsyncGenerator[Found, None]:
        """The record of that key, if there is one; `lender` as in `query`."""
        ...

    def query(
        self, filters: Filters, page_token: str | None, limit: int, lender: Lender | None = None
    ) -> AsyncGenerator[Found, None]:
        """At most `limit` records that pass every filter, newest first, each with the page_token that goes on after it.

        Of large ones there are no more in memory than `lender` lends for. DeadlineError, which tells how far it came,
        where a text was looked for longer than it may be.
        """
        ...

    async def delete(
        self, *, record_id: str | None = None, request_id: str | None = None, client: str | None = None
    ) -> int:
        """Deletes every record of the one key that is given, for good; returns how many there were.

        Those of requests that have arrived and whose records have yet to come are dropped when they do.
        """
        ...

    async def after(self, position: int, limit: int) -> list[Stored]:
        """At most `limit` of the services' records after `position`, in the order of commit.

        As they came: without what the gateway says, so that one that is read again is the same.
        """
        ...

    async def last_position(self) -> int:
        """The position of the newest commit, deleted or not; 0 where there was none."""
        ...

    async def cursors(self) -> dict[str, int]:
        """Every cursor that was ever moved."""
        ...

    async def move_cursor(self, name: str, position: int) -> None:
        """Remembers how far the reader of that name is; returns after the commit."""
        ...

    def on_append(self, notice: Callable[[], None]) -> None:
        """Has `notice` called on the event loop after each commit of services' records."""
        ...

    async def expire(self, before_us: int | None, max_bytes: int | None) -> list[int]:
        """Deletes some of the oldest records, those before a time or above a size; returns their positions.

        Empty when there are no more such. Records of the gateway's log alone count as position 0.
        """
        ...

    async def forget(self, before_us: int) -> None:
        """Forgets which sequences came, and which calls were deleted, before a time."""
        ...

    async def give_back(self) -> None:
        """Gives the space of what was deleted back to the file system, and leaves nothing of it in the log."""
        ...

    async def check(self) -> None:
        """Raises NotReadyError unless the store answers."""
        ...

    async def close(self) -> None:
        """Ends the threads after what they are doing and closes the database."""
        ...


class SqliteStore:
    """A `Store` in one SQLite file that only its owner may read.

    With `fsync` what was committed survives a power cut too; without, the process's death alone.
    """

    def __init__(
        self, path: Path, fsync: bool = True, search_s: float = SEARCH_S, commits: Commits | None = None
    ) -> None:
        self._path = path
        self._fsync = fsync
        self._commits = commits or Commits()
        self._search_s = search_s
        self._deletions = Deletions()
        self._lost_after: int | None = None  # The last position of a removed database that has no successor yet.
        self._open()
        self._writer = ThreadPoolExecutor(1, "store-writer")
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")
        self._notices: list[Callable[[], None]] = []
        self._gathered: list[AppendRequest] = []
        self._next_commit: asyncio.Task[set[int]] | None = None
        self._committing = asyncio.Lock()

    def _open(self) -> None:
        schema.prepare(self._path)
        self._writing = schema.open_for_writing(self._path, self._fsync)
        self._reading = schema.open_for_reading(self._path, _READERS)
        with self._writing.connect() as connection:
            self._deletions.load(connection)  # From the first look on there is a log beside the file.
        self._files = schema.files_of(self._path)

    def _check_files(self) -> None:
        """Begins a new database where somebody has removed the files of this one; on the writer's thread.

        SQLite would go on to write to files that have no name any more, and all of it would be gone at the stop.
        """
        if schema.files_of(self._path) == self._files:
            return
        if self._lost_after is None:
            logger.error("%s was removed, with every record in it: a new one is begun", self._path)
            self._commits.count_lost_database()
            with self._writing.connect() as connection:
                self._lost_after = schema.last_position(connection)
        self._reading.dispose()
        self._writing.dispose()
        try:
            self._open()
            with self._writing.begin() as connection:
                schema.go_on_after(connection, self._lost_after)
            self._lost_after = None
        except StartupError as error:
            raise NotReadyError(f"the payload store cannot be made anew: {error}") from None
        raise NotReadyError("the payload store has been made anew")

    async def append(self, requests: Sequence[AppendRequest]) -> list[PayloadRecord]:
        if not requests:
            return []
        self._gathered += requests
        if self._next_commit is None:
            self._next_commit = asyncio.create_task(self._commit(), name="store commit")
            # Who waited for it may have gone.
            self._next_commit.add_done_callback(lambda task: task.cancelled() or task.exception())
        new = await asyncio.shield(self._next_commit)
        return [request.record for key, request in {id(one): one for one in requests}.items() if key in new]

    async def _commit(self) -> set[int]:
        """Commits what all callers submitted during the previous commit; returns the `id` of each new request."""
        async with self._committing:
            requests, self._gathered, self._next_commit = self._gathered, [], None
            new = await self._run_writing(self._commits.observe, requests, lambda: self._add(requests))
        if new:
            for notice in self._notices:
                notice()
        return {id(request) for request in new}

    def _add(self, requests: Sequence[AppendRequest]) -> Sequence[AppendRequest]:
        with self._writing.begin() as connection:
            return writing.append(connection, requests, schema.now_us(), self._deletions)

    async def add_calls(self, calls: Sequence[PayloadRecord], reached: Collection[str] = ()) -> list[PayloadRecord]:
        return await self._write(writing.add_calls, calls, reached, schema.now_us()) if calls else []

    async def get(self, record_id: str, lender: Lender | None = None) -> AsyncGenerator[Found, None]:
        for row in await self._select(reading.by_record_id(record_id)):
            async with _loan(lender, row.size):
                if (found := await self._read(reading.one, row.position)) is not None:
                    yield found

    async def query(
        self, filters: Filters, page_token: str | None, limit: int, lender: Lender | None = None
    ) -> AsyncGenerator[Found, None]:
        before = reading.place_of(page_token) if page_token else None
        rows_per_read = _ROWS_PER_READ if filters.text else min(limit, _ROWS_PER_READ)
        give_up_at, looked_through = time.monotonic() + self._search_s, 0
        async with aclosing(self._batches(filters, before, rows_per_read, lender)) as batches:
            async for batch in batches:
                for record in filter(None, batch.found):
                    yield record
                    limit -= 1
                    if limit == 0:
                        return
                looked_through += len(batch.rows)
                if filters.text and batch.is_followed and time.monotonic() >= give_up_at:
                    raise reading.searched_too_long(looked_through, batch.rows[-1])

    async def _batches(
        self, filters: Filters, before: Place | None, rows_per_read: int, lender: Lender | None
    ) -> AsyncGenerator[_Batch, None]:
        """What a query looks at, in batches of a few bytes or of one record; the loan for one lasts until the next."""
        while True:
            rows, found = await self._read(reading.page, filters, before, rows_per_read, FREE_BYTES)
            is_full = len(rows) == rows_per_read
            rest = rows[len(found) :]
            if found:
                yield _Batch(rows[: len(found)], found, is_full or bool(rest))
            while rest:
                count = max(1, reading.fitting(rest, _BYTES_PER_BATCH))
                some, rest = rest[:count], rest[count:]
                async with _loan(lender, sum(row.size for row in some)):
                    found = await self._read(reading.read, filters, some)
                    yield _Batch(some, found, is_full or bool(rest))
            if not is_full:
                return
            before = Place(rows[-1].time_us, rows[-1].position)

    async def delete(
        self, *, record_id: str | None = None, request_id: str | None = None, client: str | None = None
    ) -> int:
        keys = {"record_id": record_id, "request_id": request_id, "client": client}
        ((column, value),) = ((column, value) for column, value in keys.items() if value is not None)
        # First, so that what comes meanwhile is covered.
        await self._write(self._deletions.add, column, value, schema.now_us())
        deleted = 0
        while batch := await self._write(removing.delete_some, schema.records.c[column] == value):
            deleted += batch
        if deleted:
            await self.give_back()
        return deleted

    async def after(self, position: int, limit: int) -> list[Stored]:
        return await self._read(_after, position, limit)

    async def last_position(self) -> int:
        return await self._read(schema.last_position)

    async def cursors(self) -> dict[str, int]:
        return {row.name: row.position for row in await self._select(sql.select(schema.cursors))}

    async def move_cursor(self, name: str, position: int) -> None:
        statement = sql.text("INSERT OR REPLACE INTO cursors (name, position) VALUES (:name, :position)")
        await self._write(sql.Connection.execute, statement, {"name": name, "position": position})

    def on_append(self, notice: Callable[[], None]) -> None:
        self._notices.append(notice)

    async def expire(self, before_us: int | None, max_bytes: int | None) -> list[int]:
        return await self._write(removing.expire_some, before_us, max_bytes)

    async def forget(self, before_us: int) -> None:
        while await self._write(removing.forget_some, before_us):
            pass
        await self._write(self._deletions.load)

    async def give_back(self) -> None:
        while await self._run_writing(removing.give_back_some, self._writing):
            pass
        await self._run_writing(removing.empty_log, self._writing)

    async def check(self) -> None:
        await self._run_writing(lambda: None)
        await self._select(sql.select(schema.records.c.position).limit(1))

    async def close(self) -> None:
        async with self._committing:
            for executor in (self._writer, self._readers):
                await asyncio.to_thread(executor.shutdown)
        self._reading.dispose()
        self._writing.dispose()

    async def _select(self, statement: sql.Executable) -> Sequence[sql.Row[Any]]:
        return await self._read(lambda connection: connection.execute(statement).all())

    async def _read(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(connection, …)` on a reader's thread, in a transaction of its own."""

        def transact() -> T:
            with self._reading.connect() as connection:
                return work(connection, *arguments)

        return await self._run(self._readers, transact)

    async def _write(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(connection, …)` on the writer's thread, committed."""

        def transact() -> T:
            with self._writing.begin() as connection:
                return work(connection, *arguments)

        return await self._run_writing(transact)

    async def _run_writing(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(…)` on the writer's thread; NotReadyError where what it wrote is in no file that exists."""

        def checked() -> T:
            result = work(*arguments)
            self._check_files()
            return result

        return await self._run(self._writer, checked)

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
        except DatabaseError as error:
            logger.error("the database failed: %s", error.orig)
            raise NotReadyError("the payload store does not answer") from error


def _loan(lender: Lender | None, size: int) -> AbstractAsyncContextManager[None]:
    return lender.loan(size) if lender else nullcontext()


def _after(connection: sql.Connection, position: int, limit: int) -> list[Stored]:
    page: list[Stored] = []
    size = 0
    for row in connection.execute(reading.after(position, limit)):
        page.append(Stored(row.position, PayloadRecord.FromString(row.body)))
        size += len(row.body)
        if size >= _BYTES_PER_READ:
            break
    return page
