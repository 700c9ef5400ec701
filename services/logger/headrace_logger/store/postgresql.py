"""The payload log in PostgreSQL.

A database that does not answer at the start, or later, does not end the logger: everything raises NotReadyError until
it answers again, and each sender keeps what was not acknowledged. What failed because a connection broke is tried again
once, on a new connection, for a restart of the server breaks all of them; a transaction that was committed just before
has no effect the second time. While the database is away, one attempt in half a second connects, and all others fail at
once, so that nothing queues up.

All transactions that write hold one advisory lock, so that several loggers write one after the other: what a
transaction reads stays true until its commit, and `position` is the order of commit.

A text in a table is a key to find records by; the records themselves are in their bodies. PostgreSQL refuses the
character NUL, and long texts in an index: so keys with NUL have another character instead, and long ones their
digest, both in the tables and in what is looked for.

Errors: StartupError if the database, or its driver, cannot be used; NotReadyError if it does not answer.
"""

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
from headrace_logger.store import tables
from headrace_logger.store.database import READERS, Database, shown

try:
    import psycopg
    from psycopg.types.string import StrDumperUnknown
except ImportError as error:
    raise StartupError(
        f"LOGGER_DATABASE_URL needs the package {error.name}: install Headrace with its extra `postgres`"
    ) from None

logger = logging.getLogger(__name__)

_CONNECT_S = 5
# A statement that waits longer has met a hung logger, or one that a network has cut off while it held the lock.
_LOCK_S, _IDLE_S, _STATEMENT_S = 10, 30, 60
_LOCK = 0x6D696C6C72616365  # The key of the lock of those that write.
_MAX_KEY = 256  # Characters; an index has room for 2,704 bytes.
_DIGEST = 64
# The driver has no codes for these errors, which the server states in its language; others are taken for passing ones.
_REFUSED = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "not permitted")
# Classes of codes: connection, conflict, resources, lock or state, the server's stop and start.
_PASSING = ("08", "40", "53", "55", "57")
_RETRY_S = 0.5
_LEASE_S = 2.0
_SAY_EVERY_S = 60.0

T = TypeVar("T")


class UnreachableError(NotReadyError):
    """The database cannot be reached, for now."""


class PostgresqlDatabase(Database):
    """See the module. `opened` gets a connection each time that the database becomes reachable."""

    is_shared = True

    def __init__(self, url: sql.URL, opened: Callable[[sql.Connection], None]) -> None:
        self._url = url
        self._opened = opened
        self._writing = engine_of(url, 1, reads_only=False)
        self._reading = engine_of(url, READERS, reads_only=True)
        self._leases = engine_of(url, 0, reads_only=False)  # One connection for each name.
        self._is_open = False
        self._failed_at = -_RETRY_S
        self._said_at = -_SAY_EVERY_S
        try:
            self._open()
        except UnreachableError as error:
            self._report(str(error))
        super().__init__()

    @contextmanager
    def begin(self) -> Iterator[sql.Connection]:
        with self._writing.begin() as connection:
            _lock(connection)
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
        """Creates or checks the tables, and reads what is kept in memory; on the writer's thread."""
        _prepare(self._writing, self._url)
        with self._writing.connect() as connection:
            self._opened(connection)
        self._is_open = True
        if self._said_at >= 0:
            logger.info("%s answers", shown(self._url))
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
            self._fail(_description_of(error), is_away=error.connection_invalidated or _code_of(error) is None)
            raise NotReadyError("the payload store does not answer") from error
        except (StartupError, UnreachableError) as error:
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


def _code_of(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


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


class _KeyDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        if len(obj) > _MAX_KEY:
            obj = obj[: _MAX_KEY - _DIGEST] + sha256(obj.encode()).hexdigest()
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))


def engine_of(url: sql.URL, connections: int, reads_only: bool) -> sql.Engine:
    """An engine with a number of connections (0: any), made when first used; no wait in it is unlimited."""
    timeouts: dict[str, Any] = {
        "connect_timeout": _CONNECT_S,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
        "application_name": "headrace-logger",
        "client_encoding": "utf8",
    }
    engine = sql.create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=connections,
        max_overflow=0,
        connect_args={name: value for name, value in timeouts.items() if name not in url.query},
    )
    settings = {"lock_timeout": f"{_LOCK_S}s", "statement_timeout": f"{_STATEMENT_S}s"}
    settings["idle_in_transaction_session_timeout"] = f"{_IDLE_S}s"
    if reads_only:
        settings |= {"default_transaction_read_only": "on", "default_transaction_isolation": "repeatable read"}

    def on_connect(connection: psycopg.Connection[Any], _: object) -> None:
        connection.adapters.register_dumper(str, _KeyDumper)
        for name, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        connection.commit()

    sql.event.listen(engine, "connect", on_connect)
    return engine


def _lock(connection: sql.Connection) -> None:
    """Waits until no other transaction writes; until the end of this one none will."""
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))


def _prepare(engine: sql.Engine, url: sql.URL) -> None:
    """Creates the tables if they are missing; raises StartupError or UnreachableError."""
    try:
        with engine.begin() as connection:
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            if encoding != "UTF8":
                raise StartupError(f"{shown(url)} has the encoding {encoding}: create a database with ENCODING 'UTF8'")
            if tables.version_of(connection) is None:
                _lock(connection)
            # Another logger may have done it meanwhile.
            tables.prepare(connection, shown(url))
    except DBAPIError as error:
        raise _error_of(error, url) from None


def _description_of(error: DBAPIError) -> str:
    """The driver's message in one line; the server's without details, which may have texts of records."""
    diagnostics = getattr(error.orig, "diag", None)
    return " ".join(((diagnostics and diagnostics.message_primary) or str(error.orig)).split())


def _error_of(error: DBAPIError, url: sql.URL) -> StartupError | UnreachableError:
    text = f"LOGGER_DATABASE_URL={shown(url)}: {_description_of(error)}"
    code = _code_of(error)
    is_permanent = code is not None and not code.startswith(_PASSING)
    if is_permanent or (code is None and any(reason in text for reason in _REFUSED)):
        return StartupError(text)
    return UnreachableError(text)
