"""`python -m headrace_logger backup` and `restore`: the payload log's database as one file, and back.

A backup is an SQLite file of its own, in which only the owner can read, of the state at its begin. It is copied by
SQLite's online backup API within one read transaction: in WAL mode a reader never waits for the logger, nor the logger
for it, and commits do not make the copy start again. Meanwhile the logger's write-ahead log keeps what is committed.
The file appears under its name once it is complete and its integrity is checked.

A restore writes the database in one transaction, so that one that is killed leaves the old contents. A running logger
holds a lock of WAL mode on its database, as does any other reader: the restore takes the file exclusively, or refuses.

Errors: StartupError, one line, if a file cannot be used.
"""

import argparse
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tqdm import tqdm

from headrace.errors import StartupError
from headrace.files import private_file
from headrace_logger.command import database_of, run_command
from headrace_logger.store.sqlite import BUSY_MS
from headrace_logger.store.tables import check_version

# Called after each step with SQLite's status, and the pages that remain and are there in all.
Progress = Callable[[int, int, int], None]

_PAGES = 1024  # A step, after which an interrupt ends the copy: 4 MiB.
_PRIMARY_CODE = 0xFF  # Of an SQLite error code with details in the higher bits.


def main(command: str, arguments: Sequence[str]) -> int:
    """Runs the command `backup` or `restore`; returns the exit code."""
    options = _parse(command, arguments)
    return run_command(command, lambda: _run(command, options))


def backup(database: Path, file: Path, progress: Progress | None = None) -> int:
    """Writes a backup, which replaces an earlier one; returns the number of its records."""
    _check_different(file, database)
    with (
        private_file(file, str(file)) as copy,
        _reading(database) as source,
        closing(sqlite3.connect(copy.name)) as target,
        _errors_of(file),
    ):
        source.backup(target, pages=_PAGES, progress=progress)
        _check_integrity(file, target)
        count = _count(target)
    # The new name survives a power failure too.
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return count


def restore(file: Path, database: Path, force: bool, progress: Progress | None = None) -> int:
    """Makes the database that of a backup; returns the number of its records.

    Refuses if the database is in use, and, without `force`, if there is one.
    """
    _check_different(file, database)
    with _reading(file) as source, _alone_with(database, force) as target:
        with _errors_of(file):
            _check_integrity(file, source)
        with _errors_of(database):
            source.backup(target, pages=_PAGES, progress=progress)
            return _count(target)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A payload log of this schema version, as it is now; others are refused."""
    if not path.is_file():
        raise StartupError(f"{path}: no such file")
    with _errors_of(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=BUSY_MS / 1000
        )
    with closing(connection):
        with _errors_of(path):
            # The first read within it fixes the state that all others see.
            connection.execute("BEGIN")
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'schema_version'").fetchall():
                raise StartupError(f"{path} is not a payload log")
            (version,) = connection.execute("SELECT version FROM schema_version").fetchone()
        check_version(version, str(path))
        yield connection


@contextmanager
def _alone_with(database: Path, force: bool) -> Iterator[sqlite3.Connection]:
    """The database, locked against everyone else; it is created, private, and removed if the block fails."""
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        is_new = True
    except FileExistsError:
        is_new = False
        if not force:
            raise StartupError(f"{database} exists: --force replaces it, with every record in it") from None
    except OSError as error:
        raise StartupError(f"{database}: {error.strerror}") from None
    try:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=0)) as connection:
            with _errors_of(database):
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                # Leaving WAL mode takes a lock that no other connection allows, and removes the write-ahead log.
                connection.execute("PRAGMA journal_mode = DELETE")
                connection.execute("BEGIN EXCLUSIVE")
                connection.execute("COMMIT")
            yield connection
    except BaseException:
        if is_new:
            database.unlink(missing_ok=True)
        raise


def _check_different(file: Path, database: Path) -> None:
    if file.exists() and database.exists() and file.samefile(database):
        raise StartupError(f"{file} is the database itself")


def _check_integrity(path: Path, connection: sqlite3.Connection) -> None:
    (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if result != "ok":
        raise StartupError(f"{path} is damaged: {' '.join(result.split())}")


def _count(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM records").fetchone()
    return int(count)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raises StartupError, which names the file, for an error of SQLite."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StartupError(f"{path} is in use: stop its logger, and all others that read it") from None
        raise StartupError(f"{path}: {error}") from None


def _run(command: str, options: argparse.Namespace) -> str:
    database = database_of(options.database)
    if not isinstance(database, Path):
        tool = "pg_dump --format=custom" if command == "backup" else "pg_restore"
        raise StartupError(f"the logger's database is PostgreSQL: use {tool}; or name an SQLite file with --database")
    with tqdm(unit=" pages", disable=not sys.stderr.isatty()) as shown:

        def show(_: int, remaining: int, total: int) -> None:
            shown.total = total
            shown.update(total - remaining - shown.n)

        if command == "backup":
            count = backup(database, options.file, show)
        else:
            count = restore(options.file, database, options.force, show)
    return f"{count} records"


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m headrace_logger {command}",
        description="Writes the payload log's database to a file. The logger may be running."
        if command == "backup"
        else "Makes the payload log's database that of a backup. Stop the logger first.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the backup")
    if command == "restore":
        parser.add_argument("--force", action="store_true", help="replace a database, with every record in it")
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="the logger's database; default: LOGGER_DATABASE, as the logger"
    )
    return parser.parse_args(arguments)
