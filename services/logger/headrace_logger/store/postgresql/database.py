"""The connections of a logger to PostgreSQL.

A database that does not answer at the start, or later, does not end the logger: everything raises NotReadyError until
it answers again, and each sender keeps what was not acknowledged. What failed because a connection broke is tried again
once, on a new connection, for a restart of the server breaks all of them; a transaction that was committed just before
has no effect the second time. While the database is away, one attempt in half a second connects, and all others fail at
once, so that nothing queues up.

Errors: StartupError if the database cannot be used as it is, NotReadyError if it does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError

from headrace.errors import NotReadyError, StartupError
from headrace_logger.store.database import READERS, Database
from headrace_logger.store.postgresql import schema

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_LEASE_S = 2.0
_SAY_EVERY_S = 60.0

T = TypeVar("T")


class PostgresqlDatabase(Database):
    """See the module. `opened` gets a connection each time that the database becomes reachable."""

    is_shared = True

    def __init__(self, url: sql.URL, opened: Callable[[sql.Connection], None]) -> None:
        self._url = url
        self._opened = opened
        self._writing = schema.engine_of(url, 1, reads_only=False)
        self._reading = schema.engine_of(url, READERS, reads_only=True)
        self._leases = schema.engine_of(url, 0, reads_only=False)  # One connection for each name.
        self._is_open = False
        self._failed_at = -_RETRY_S
        self._said_at = -_SAY_EVERY_S
        try:
            self._open()
        except schema.UnreachableError as error:
            self._report(str(error))
        super().__init__()

    @contextmanager
    def begin(self) -> Iterator[sql.Connection]:
        with self._writing.begin() as connection:
            schema.lock(connection)
            yield connection

    async def run_writing(self, work: Callable[..., T], *arguments: Any) -> T:
        def opened() -> T:
            if not self._is_open:
                self._open()
            return work(*arguments)

        return await self._run(self._writer, opened)

    async def give_back(self) -> None:
        """PostgreSQL's autovacuum does it."""

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[Callable[[], bool]]:
        """A lock of a session of its own, which ends with its connection: see Database.

        A logger that is cut off from the database keeps its connection for a while, as the server does.
        """
        key = int.from_bytes(sha256(name.encode()).digest()[:8], signed=True)
        while (session := await asyncio.to_thread(self._try_lock, key)) is None:  # noqa: ASYNC110  # other processes'
            await asyncio.sleep(_LEASE_S)
        try:
            yield lambda: _holds(session)
        finally:
            await asyncio.to_thread(_unlock, session)

    async def close(self) -> None:
        await super().close()
        for engine in (self._reading, self._writing, self._leases):
            engine.dispose()

    def _try_lock(self, key: int) -> sql.Connection | None:
        """A connection that holds the lock; None if another one does, or none can be had."""
        try:
            session = self._leases.connect().execution_options(isolation_level="AUTOCOMMIT")
        except DBAPIError:
            return None
        try:
            if session.exec_driver_sql("SELECT pg_try_advisory_lock(%s)", (key,)).scalar_one():
                return session
        except DBAPIError:
            pass
        session.close()
        return None

    def _open(self) -> None:
        """Checks or migrates the schema, and reads what is kept in memory; on the writer's thread."""
        schema.prepare(self._writing, self._url)
        with self._writing.connect() as connection:
            self._opened(connection)
        self._is_open = True
        if self._said_at >= 0:
            logger.info("%s answers", schema.shown(self._url))
        self._said_at = -_SAY_EVERY_S

    async def _run(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, self._attempt, work)

    def _attempt(self, work: Callable[[], T]) -> T:
        if time.monotonic() - self._failed_at < _RETRY_S:
            raise NotReadyError("the payload store does not answer")
        try:
            try:
                return work()
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # The other connections are broken too, and new ones may be to another database.
                self._is_open = False
                self._writing.dispose()
                self._reading.dispose()
                return work()
        except DBAPIError as error:
            self._fail(schema.description_of(error), is_away=error.connection_invalidated or not _has_code(error))
            raise NotReadyError("the payload store does not answer") from error
        except (StartupError, schema.UnreachableError) as error:
            self._fail(str(error), is_away=True)
            raise NotReadyError("the payload store does not answer") from None

    def _fail(self, description: str, is_away: bool) -> None:
        if is_away:
            self._failed_at = time.monotonic()
            self._is_open = False
            self._report(description)
        else:
            logger.error("the database failed: %s", description)

    def _report(self, description: str) -> None:
        """Logs that the database does not answer, once a minute."""
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            logger.error("the payload store does not answer; trying again: %s", description)


def _has_code(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) is not None


def _holds(session: sql.Connection) -> bool:
    """Whether a session lives; its locks end with it."""
    try:
        session.exec_driver_sql("SELECT 1")
    except DBAPIError:
        return False
    return True


def _unlock(session: sql.Connection) -> None:
    """Ends a session, and so its locks."""
    session.invalidate()
    session.close()
