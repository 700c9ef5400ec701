"""The payload log's schema in PostgreSQL, and engines for it.

The tables are those of tables.py, made and changed by the migrations of Alembic in `migrations`. All transactions that
write hold one advisory lock, so that several loggers write one after the other: what a transaction reads stays true
until its commit, and `position` is the order of commit.

A text in a table is a key to find records by; the records themselves are in their bodies. PostgreSQL refuses the
character NUL, and long texts in an index: so keys with NUL have another character instead, and long ones their
digest, both in the tables and in what is looked for.

Errors: StartupError if the database cannot be used as it is; UnreachableError if it may be reachable later.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sql
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg.types.string import StrDumperUnknown
from sqlalchemy.exc import DBAPIError

from headrace.errors import NotReadyError, StartupError

CONNECT_S = 5
# A statement that waits longer has met a hung logger, or one that a network has cut off while it held the lock.
_LOCK_S, _IDLE_S, _STATEMENT_S = 10, 30, 60
_LOCK = 0x6D696C6C72616365  # "headrace": the key of the lock of those that write.
_MAX_KEY = 256  # Characters; an index has room for 2,704 bytes.
_DIGEST = 64
_MIGRATIONS = Path(__file__).parent / "migrations"
# The driver has no codes for these errors, which the server states in its language; others are taken for passing ones.
_REFUSED = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "not permitted")
# Classes of codes: connection, conflict, resources, lock or state, the server's stop and start.
_PASSING = ("08", "40", "53", "55", "57")


class UnreachableError(NotReadyError):
    """The database cannot be reached, for now."""


class _KeyDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        if len(obj) > _MAX_KEY:
            obj = obj[: _MAX_KEY - _DIGEST] + hashlib.sha256(obj.encode()).hexdigest()
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))


def engine_of(url: sql.URL, connections: int, reads_only: bool) -> sql.Engine:
    """An engine with a number of connections (0: any), made when first used; no wait in it is unlimited."""
    timeouts: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
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


def lock(connection: sql.Connection) -> None:
    """Waits until no other transaction writes; until the end of this one none will."""
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))


def prepare(engine: sql.Engine, url: sql.URL) -> None:
    """Migrates the database to the current schema; raises StartupError or UnreachableError."""
    try:
        with engine.begin() as connection:
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            if encoding != "UTF8":
                raise StartupError(f"{shown(url)} has the encoding {encoding}: create a database with ENCODING 'UTF8'")
            if not _is_current(connection, url):
                lock(connection)
                # Another logger may have done it meanwhile.
                if not _is_current(connection, url):
                    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                    command.upgrade(_config(connection), "head")
    except DBAPIError as error:
        raise _error_of(error, url) from None


def check(engine: sql.Engine, url: sql.URL) -> None:
    """Raises StartupError unless the database has the current schema."""
    try:
        with engine.connect() as connection:
            if not _is_current(connection, url):
                raise StartupError(f"{shown(url)} has no payload log of this version: start this logger with it once")
    except DBAPIError as error:
        raise StartupError(str(_error_of(error, url))) from None


def shown(url: sql.URL) -> str:
    """The URL for messages: without the password and options."""
    return url.set(query={}).render_as_string(hide_password=True)


def description_of(error: DBAPIError) -> str:
    """The driver's message in one line; the server's without details, which may have texts of records."""
    diagnostics = getattr(error.orig, "diag", None)
    return " ".join(((diagnostics and diagnostics.message_primary) or str(error.orig)).split())


def _is_current(connection: sql.Connection, url: sql.URL) -> bool:
    """Whether the database has the current schema; raises StartupError if it has a newer one."""
    version = MigrationContext.configure(connection).get_current_revision()
    scripts = ScriptDirectory.from_config(_config(connection))
    if version is not None:
        try:
            scripts.get_revision(version)
        except CommandError:
            raise StartupError(
                f"{shown(url)} has schema version {version}, this logger knows {scripts.get_current_head()}: "
                "start a newer logger or name another database in LOGGER_DATABASE_URL"
            ) from None
    return version == scripts.get_current_head()


def _config(connection: sql.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _error_of(error: DBAPIError, url: sql.URL) -> StartupError | UnreachableError:
    text = f"LOGGER_DATABASE_URL={shown(url)}: {description_of(error)}"
    code = getattr(error.orig, "sqlstate", None)
    is_permanent = code is not None and not code.startswith(_PASSING)
    if is_permanent or (code is None and any(reason in text for reason in _REFUSED)):
        return StartupError(text)
    return UnreachableError(text)
