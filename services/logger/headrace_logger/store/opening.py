"""Opens the database of a location: an SQLite file, or PostgreSQL by its URL, whose driver is an extra."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import sqlalchemy as sql
from pydantic import SecretStr

from headrace.errors import StartupError
from headrace_logger.store import sqlite
from headrace_logger.store.database import Database

# A file, or the URL of a PostgreSQL, which has a password.
Location: TypeAlias = Path | SecretStr


def open_database(
    location: Location, fsync: bool, opened: Callable[[sql.Connection], None], lost: Callable[[], None]
) -> Database:
    """See SqliteDatabase and PostgresqlDatabase; raises StartupError."""
    if isinstance(location, Path):
        return sqlite.SqliteDatabase(location, fsync, opened, lost)
    from headrace_logger.store.postgresql import PostgresqlDatabase

    return PostgresqlDatabase(sql.make_url(location.get_secret_value()), opened)


def open_for_reading(location: Location) -> sql.Engine:
    """A read-only engine on a database, which may be another than a payload log; raises StartupError."""
    if isinstance(location, Path):
        if not location.is_file():
            raise StartupError(f"{location}: no such database; LOGGER_DATABASE or --database names the logger's")
        return sqlite.open_for_reading(location, 1)
    from headrace_logger.store.postgresql import engine_of

    return engine_of(sql.make_url(location.get_secret_value()), 1, reads_only=True)


def name_of(location: Location) -> str:
    """The database in messages."""
    if isinstance(location, Path):
        return str(location)
    return sql.make_url(location.get_secret_value()).set(query={}).render_as_string(hide_password=True)
