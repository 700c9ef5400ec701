"""`python -m services.logger export`: exports the payload log to a file, Parquet or JSON lines.

Reads a database that a logger may be writing to, and never changes it. Records that are committed when the export
begins are exported, oldest first, in short transactions, so that the logger is not blocked; records deleted during the
export are missing. The file appears under its name once it is complete. Rows and their types:
`services.logger.store.values`, `services.logger.export.parquet`.

Errors: StartupError, one line, if the database or the output cannot be used.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import ValidationError
from tqdm import tqdm

from millrace.errors import StartupError
from millrace_protos.millrace_pb2 import PayloadRecord, QueryPayloadsRequest
from services.logger.settings import LoggerSettings
from services.logger.store.filters import Filters
from services.logger.store.snapshot import Snapshot
from services.logger.store.values import row, to_json

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BATCH_ROWS = 1000
_BATCH_BYTES = 2 * 1024 * 1024
_INTERRUPTED = 130  # A shell's exit code for SIGINT.


class _Writer(Protocol):
    def write(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """Writes one JSON object in each line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self._file.writelines(to_json(row) + b"\n" for row in rows)

    def close(self) -> None:
        """Writes buffered rows."""
        self._file.flush()


def main(arguments: Sequence[str]) -> int:
    """Runs the export of the command line; returns the exit code."""
    options = _parse(arguments)
    try:
        count = export(options.database or _database(), options.format, options.output, _filters(options))
    except StartupError as error:
        sys.stderr.write(f"export: {error}\n")
        return 1
    except BrokenPipeError:
        _leave_stdout()  # The reader has closed the pipe.
        return 0
    except KeyboardInterrupt:
        _leave_stdout()
        sys.stderr.write("export: interrupted\n")
        return _INTERRUPTED
    sys.stderr.write(f"export: {count} records\n")
    return 0


def export(database: Path, file_format: str, output: str, filters: Filters) -> int:
    """Writes the records that pass the filters to the file `output`, "-" for stdout; returns their number."""
    with Snapshot(database, filters) as snapshot, _open(output) as file:
        writer = _writer(file_format, file)
        shown = sys.stderr.isatty()
        total = snapshot.count() if shown else None
        count = 0
        with tqdm(total=total, unit=" records", disable=not shown) as progress:
            for rows in _batches(snapshot.records()):
                writer.write(rows)
                count += len(rows)
                progress.update(len(rows))
        writer.close()
    return count


def _leave_stdout() -> None:
    """Detaches stdout: Python's flush at exit would fail on a closed pipe, or hang on a reader that has stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def instant(text: str, now: datetime | None = None) -> datetime:
    """Parses a date, a time or an age such as 24h to a time in UTC; a time without a zone is UTC."""
    now = now or datetime.now(UTC)
    age = re.fullmatch(r"(\d+)([smhdw])", text)
    try:
        if age:
            return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (OverflowError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a date, a time or an age such as 24h") from None


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m services.logger export",
        description="Writes payload records to a file, oldest first. The logger may be running.",
        epilog="TIME is a date (2026-01-31), a time (2026-01-31T12:00, UTC by default) or an age "
        "(90s, 30m, 24h, 7d, 2w).",
    )
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="default: %(default)s")
    parser.add_argument("--since", type=instant, metavar="TIME", help="requests that arrived then or later")
    parser.add_argument("--until", type=instant, metavar="TIME", help="requests that arrived before")
    parser.add_argument("--model", help="this model's requests only")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write, - for stdout")
    parser.add_argument(
        "--database", type=Path, metavar="FILE", help="the logger's database; default: LOGGER_DATABASE, as the logger"
    )
    return parser.parse_args(arguments)


def _database() -> Path:
    try:
        return LoggerSettings().database
    except ValidationError as error:
        first = error.errors()[0]
        raise StartupError(f"LOGGER_{first['loc'][0]}: {first['msg']}; or name a file with --database") from None


def _filters(options: argparse.Namespace) -> Filters:
    request = QueryPayloadsRequest()
    if options.model is not None:
        request.model = options.model
    if options.since:
        request.since.FromDatetime(options.since)
    if options.until:
        request.until.FromDatetime(options.until)
    return Filters(request)


def _writer(file_format: str, file: IO[bytes]) -> _Writer:
    if file_format == "jsonl":
        return JsonLinesWriter(file)
    # pyarrow takes a second to import, and JSON lines do not need it.
    from services.logger.export.parquet import ParquetWriter

    return ParquetWriter(file)


def _batches(records: Iterable[PayloadRecord]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for record in records:
        rows.append(row(record))
        size += record.ByteSize()
        if len(rows) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


@contextmanager
def _open(output: str) -> Iterator[IO[bytes]]:
    """The output file; it gets its name only if the block succeeds. Only its owner can read it: it contains prompts."""
    if output == "-":
        if sys.stdout.isatty():
            raise StartupError("--output - is for a pipe, not for a terminal")
        yield sys.stdout.buffer
        return
    path = Path(output)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                yield file
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StartupError(f"--output {output}: {error.strerror}") from None
