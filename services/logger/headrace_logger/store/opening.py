"""Opens the database of the settings or of a command: an SQLite file, or PostgreSQL by its URL."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import sqlalchemy as sql
from pydantic import SecretStr

from headrace_logger.settings import LoggerSettings
from headrace_logger.store import schema
from headrace_logger.store.store import SqliteStore, Store

# A file, or the URL of a PostgreSQL, which has a password.
Location: TypeAlias = Path | SecretStr


def open_store(settings: LoggerSettings) -> Store:
    """The store of the settings; raises StartupError."""
    if settings.database_url is None:
        return SqliteStore(settings.database, settings.fsync)
    # Their driver is an extra.
    from headrace_logger.store.postgresql import PostgresqlStore

    return PostgresqlStore(settings.database_url)


def open_for_export(location: Location) -> sql.Engine:
    """A read-only engine on a database with the current schema; raises StartupError."""
    if isinstance(location, Path):
        return schema.open_for_export(location)
    from headrace_logger.store.postgresql import open_for_export as open_postgresql

    return open_postgresql(location)


def name_of(location: Location) -> str:
    """The database in messages."""
    if isinstance(location, Path):
        return str(location)
    return sql.make_url(location.get_secret_value()).set(query={}).render_as_string(hide_password=True)
