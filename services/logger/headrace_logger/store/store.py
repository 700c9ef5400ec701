"""The store of payload records: by key, by filter and in the order of commit, in SQLite or PostgreSQL; and usage.

`append` returns after the commit; a (source, sequence) or record_id that has arrived before has no effect, even if its
record was deleted. Reads return the newest first, by the records' times, except `after`, which reads in the order of
commit. A call that a service may have recorded is not shown for a while, until the service's record can have arrived.

A query reads some records at a time, each time in a transaction, and keeps none open for a slow reader. Long work
(deleting, freeing space) is done in small steps, between which others can write. For threads see database.py.

Errors: StartupError if the file cannot be used, NotReadyError if the database stops answering, InvalidRequestError for
an invalid page token, DeadlineError if a text search or the sum of usage takes too long.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path

import sqlalchemy as sql

from headrace.errors import NotReadyError
from headrace_logger.read_limits import FREE_BYTES, Reader
from headrace_logger.settings import Location
from headrace_logger.store import deletions, reading, shares, sqlite, tables, usage, writing
from headrace_logger.store.database import Database
from headrace_logger.store.filters import Filters
from headrace_logger.store.reading import Found, Place, Row, Stored
from headrace_logger.store.writing import GatewayLine
from headrace_logger.telemetry import Commits
from headrace_protos.headrace_pb2 import AppendRequest, UsageRequest, UsageResponse

SEARCH_S = 5.0

_CHECK = "health check"
_REFUSED_S = 30.0
_ROWS_PER_READ = 100
_BYTES_PER_BATCH = 1024 * 1024


class Store:
    """The records of a `database`; an SQLite file is one that only its owner can read.

    With `fsync` SQLite's commits survive a power failure; without it, only the death of the process. `search_s` is the
    limit of a text search and of a sum of usage.
    """

    def __init__(
        self, location: Location, fsync: bool = True, search_s: float = SEARCH_S, commits: Commits | None = None
    ) -> None:
        self._commits = commits or Commits()
        self._search_s = search_s
        self._usage = usage.UsageSums()
        self.database = open_database(location, fsync, self._usage.load, self._commits.count_lost_database)
        self._notices: list[Callable[[], None]] = []
        self._gathered: list[AppendRequest] = []
        self._next_commit: asyncio.Task[None] | None = None
        self._committing = asyncio.Lock()
        self._refused_until = 0.0  # From a commit of records that failed, to the next one or this time.

    async def append(self, requests: Sequence[AppendRequest]) -> None:
        """Commits the records, all or none; existing ones stay unchanged."""
        self._gathered += requests
        if self._next_commit is None:
            self._next_commit = asyncio.create_task(self._commit(), name="store commit")
            # Its callers may have left; this retrieves the exception.
            self._next_commit.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next_commit)

    async def _commit(self) -> None:
        """Commits the requests submitted during the previous commit."""
        async with self._committing:
            requests, self._gathered, self._next_commit = self._gathered, [], None
            try:
                new = await self.database.run_writing(self._commits.observe, requests, lambda: self._add(requests))
            except NotReadyError:
                self._refused_until = time.monotonic() + _REFUSED_S
                raise
            self._refused_until = 0.0
        if new:
            for notice in self._notices:
                notice()

    def _add(self, requests: Sequence[AppendRequest]) -> Sequence[AppendRequest]:
        with self.database.begin() as connection:
            return writing.append(connection, requests, tables.now_us(), self._usage)

    async def add_calls(self, calls: Sequence[GatewayLine]) -> None:
        """Commits calls that the gateway logged.

        A call is joined to the services' records with its call_id. Without such a record it is a record of its own
        until one arrives.
        """
        if calls:
            await self.database.write(writing.add_calls, calls, tables.now_us())

    async def get(
        self, record_id: str, lender: Reader | None = None, client: str | None = None
    ) -> AsyncGenerator[Found, None]:
        """Yields the record with this id, if there is one and it is the client's; `lender` as in `query`."""
        for row in await self.database.select(reading.by_record_id(record_id, client)):
            async with _loan(lender, row.size):
                if (found := await self.database.read(reading.one, row.position)) is not None:
                    yield found

    async def query(
        self, filters: Filters, page_token: str | None, limit: int, lender: Reader | None = None
    ) -> AsyncGenerator[Found, None]:
        """Yields at most `limit` records that pass every filter, newest first, each with the next page_token.

        `lender` bounds the large records in memory. Raises DeadlineError, which states the progress, if a text search
        takes too long.
        """
        before = await self.database.read(reading.place_of, page_token) if page_token else None
        rows_per_read = _ROWS_PER_READ if filters.text else min(limit, _ROWS_PER_READ)
        give_up_at, looked_through = time.monotonic() + self._search_s, 0
        async with aclosing(self._batches(filters, before, rows_per_read, lender)) as batches:
            async for rows, found, is_followed in batches:
                for record in filter(None, found):
                    yield record
                    limit -= 1
                    if limit == 0:
                        return
                looked_through += len(rows)
                if filters.text and is_followed and time.monotonic() >= give_up_at:
                    raise reading.searched_too_long(looked_through, rows[-1])

    async def _batches(
        self, filters: Filters, before: Place | None, rows_per_read: int, lender: Reader | None
    ) -> AsyncGenerator[tuple[Sequence[Row], Sequence[Found | None], bool], None]:
        """The rows of a query, in batches of a few bytes or of one record; a batch's loan lasts until the next one.

        A batch has rows, the matching record of each or None, and whether more rows follow.
        """
        while True:
            rows, found = await self.database.read(reading.page, filters, before, rows_per_read, FREE_BYTES)
            is_full = len(rows) == rows_per_read
            rest = rows[len(found) :]
            if found:
                yield rows[: len(found)], found, is_full or bool(rest)
            while rest:
                count = max(1, reading.fitting(rest, _BYTES_PER_BATCH))
                some, rest = rest[:count], rest[count:]
                async with _loan(lender, sum(row.size for row in some)):
                    found = await self.database.read(reading.read, filters, some)
                    yield some, found, is_full or bool(rest)
            if not is_full:
                return
            before = Place(rows[-1].time_us, rows[-1].position)

    async def usage(self, request: UsageRequest) -> UsageResponse:
        """The usage by group; raises InvalidRequestError for wrong groups, and if there are too many."""
        return await self.database.read(usage.select, request, self._search_s)

    async def delete(self, of_client: str | None = None, /, **key: str) -> int:
        """Deletes every record with one key permanently: record_id, request_id or client; returns their number.

        With `of_client`, only those of a client. Records that arrive later are dropped if their requests arrived before
        the deletion.
        """
        ((column, value),) = key.items()
        # Registered first, so that records that arrive meanwhile are covered.
        await self.database.write(deletions.add, column, value, of_client or "", tables.now_us())
        chosen = tables.records.c[column] == value
        if of_client is not None:
            chosen &= tables.records.c.client == of_client
        deleted = 0
        while batch := await self.database.write(deletions.delete_some, chosen):
            deleted += batch
        if deleted:
            await self.database.give_back()
        return deleted

    async def after(self, position: int, limit: int) -> list[Stored]:
        """Returns at most `limit` of the services' records after `position`, in the order of commit.

        Without the gateway's part, so that every read of a record returns the same.
        """
        return await self.database.read(reading.after, position, limit)

    async def committed(self, filters: Filters, position: int) -> tuple[Sequence[Row], int]:
        """See `reading.committed`; examines a page of records."""
        return await self.database.read(reading.committed, filters, position, _ROWS_PER_READ)

    async def bodies(self, filters: Filters, rows: Sequence[Row], lender: Reader) -> AsyncGenerator[bytes, None]:
        """The serialized records of rows that `committed` found, without the gateway's part; `lender` as in `query`."""
        while rows:
            count = max(1, reading.fitting(rows, FREE_BYTES))
            some, rows = rows[:count], rows[count:]
            async with lender(sum(row.size for row in some)):
                for body in await self.database.read(reading.bodies, filters, some):
                    yield body

    async def last_position(self) -> int:
        """The position of the newest commit, even if deleted; 0 if there was none."""
        return await self.database.read(reading.last_position)

    async def newest_position(self) -> int:
        """The position of the newest record; 0 if there is none."""
        return await self.database.read(reading.newest_position)

    async def cursors(self) -> dict[str, int]:
        return {row.name: row.position for row in await self.database.select(sql.select(tables.cursors))}

    async def move_cursor(self, name: str, position: int) -> None:
        """Saves a reader's position under its name; returns after the commit."""
        row = {"name": name, "position": position}
        await self.database.write(
            lambda connection: tables.upsert(connection, tables.cursors, [row], replaced=("position",))
        )

    def on_append(self, notice: Callable[[], None]) -> None:
        """Registers a callback that runs on the event loop after each commit of services' records."""
        self._notices.append(notice)

    async def expire(self, before_us: int | None, max_bytes: int | None) -> list[int]:
        """Deletes some of the oldest records, those before a time or above a size; returns their positions.

        Empty when none are left. Records of only the gateway's line count as position 0.
        """
        return await self.database.write(shares.expire_some, before_us, max_bytes)

    async def forget(self, before_us: int) -> None:
        """Forgets sequences that were received, and calls that were deleted, before a time."""
        while await self.database.write(shares.forget_some, before_us):
            pass

    async def forget_usage(self, before_us: int) -> None:
        """Forgets the usage of hours that ended before a time."""
        while await self.database.write(usage.forget_some, before_us):
            pass

    async def check(self) -> None:
        """Commits a small write; raises NotReadyError unless it, and the records that came last, could be committed."""
        await self.move_cursor(_CHECK, 0)
        await self.check_reading()
        # On a full disk the small write may find room where records do not. They are sent again and again.
        if time.monotonic() < self._refused_until:
            raise NotReadyError("the newest records could not be committed")

    async def check_reading(self) -> None:
        """Raises NotReadyError unless the store answers to reads."""
        await self.database.select(sql.select(tables.records.c.position).limit(1))

    async def close(self) -> None:
        """Ends the threads after their current work and closes the database."""
        async with self._committing:
            await self.database.close()


def _loan(lender: Reader | None, size: int) -> AbstractAsyncContextManager[None]:
    return lender(size) if lender else nullcontext()


def open_database(
    location: Location, fsync: bool, opened: Callable[[sql.Connection], None], lost: Callable[[], None]
) -> Database:
    """See SqliteDatabase and PostgresqlDatabase; raises StartupError."""
    if isinstance(location, Path):
        return sqlite.SqliteDatabase(location, fsync, opened, lost)
    from headrace_logger.store.postgresql import PostgresqlDatabase

    return PostgresqlDatabase(sql.make_url(location.get_secret_value()), opened)
