"""The payload log in PostgreSQL: connections, and the schema's migrations by Alembic.

Errors: StartupError if the database, or the packages of the extra `postgres`, cannot be used.
"""

from __future__ import annotations

import logging

import sqlalchemy as sql
from pydantic import SecretStr

from headrace.errors import StartupError
from headrace_logger.store.database import Database
from headrace_logger.store.store import SEARCH_S, Store
from headrace_logger.telemetry import Commits

# It would report each of its plugins, at its import.
logging.getLogger("alembic").setLevel(logging.WARNING)
try:
    from headrace_logger.store.postgresql import schema
    from headrace_logger.store.postgresql.database import PostgresqlDatabase
except ImportError as error:
    raise StartupError(
        f"LOGGER_DATABASE_URL needs the package {error.name}: install Headrace with its extra `postgres`"
    ) from None


class PostgresqlStore(Store):
    """A database of PostgreSQL, to which several loggers may write."""

    def __init__(self, url: SecretStr, search_s: float = SEARCH_S, commits: Commits | None = None) -> None:
        self._url = sql.make_url(url.get_secret_value())
        super().__init__(search_s, commits or Commits())

    def _open(self) -> Database:
        return PostgresqlDatabase(self._url, self._load)


def open_for_export(url: SecretStr) -> sql.Engine:
    """A read-only engine on a database with the current schema; raises StartupError."""
    parsed = sql.make_url(url.get_secret_value())
    engine = schema.engine_of(parsed, 1, reads_only=True)
    try:
        schema.check(engine, parsed)
    except StartupError:
        engine.dispose()
        raise
    return engine
