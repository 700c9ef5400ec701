"""`python -m headrace_logger export`: exports the payload log to a file, or to a folder with a file for each hour.

Reads a database that a logger may be writing to, and never changes it. Records that are committed when the export
begins are exported, oldest first, in short transactions, so that the logger is not blocked; records deleted during the
export are missing. A file appears under its name once it is complete. Rows and their types:
`headrace_logger.values`, `headrace_logger.export.parquet`, which writes a file for each hour too; other formats:
`headrace_logger.export.shapes`.

Errors: StartupError, one line, if the database or the output cannot be used.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

from tqdm import tqdm

from headrace.errors import StartupError
from headrace.files import private_file
from headrace_logger.command import database_of, run_command
from headrace_logger.export.shapes import SHAPES, write_lines
from headrace_logger.export.snapshot import Snapshot, batches, filters_of
from headrace_logger.settings import Location
from headrace_logger.store.filters import Filters

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def main(arguments: Sequence[str]) -> int:
    """Runs the export of the command line; returns the exit code."""
    options = _parse(arguments)
    return run_command("export", lambda: _run(options))


def export(database: Location, file_format: str, output: str, filters: Filters) -> tuple[int, Counter[str]]:
    """Writes the records that pass the filters to the file `output`, "-" for stdout.

    Returns the number of records written, and of those that the format has no line for, by reason.
    """
    with closing(Snapshot(database, filters)) as snapshot, _open(output) as file:
        shown = sys.stderr.isatty()
        total = snapshot.count() if shown else None
        some = batches(tqdm(snapshot.records(), total=total, unit=" records", disable=not shown))
        if file_format in SHAPES:
            return write_lines(file, SHAPES[file_format](), some)
        # pyarrow takes a second to import, and JSON lines do not need it.
        from headrace_logger.export.parquet import write_parquet

        return write_parquet(file, some), Counter()


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


def _run(options: argparse.Namespace) -> str:
    database = database_of(options.database)
    if options.partition:
        # pyarrow takes a second to import.
        from headrace_logger.export.parquet import export_hours

        return export_hours(database, options.output, options.since, datetime.now(UTC))
    filters = filters_of(options.since, options.until, options.model)
    count, left_out = export(database, options.format, options.output, filters)
    lines = [f"{count} records"]
    lines += [f"left out {number}: {reason}" for reason, number in left_out.most_common()]
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m headrace_logger export",
        description="Writes payload records to a file, oldest first. The logger may be running.",
        epilog="parquet and jsonl have whole records. chat: examples for fine-tuning, with whole answers only. "
        "mooncake: a trace of arrivals, without contents. guidellm: a dataset of prompts. "
        "TIME is a date (2026-01-31), a time (2026-01-31T12:00, UTC by default) or an age (90s, 30m, 24h, 7d, 2w).",
    )
    parser.add_argument("--format", choices=("parquet", *SHAPES), default="parquet", help="default: %(default)s")
    parser.add_argument("--since", type=instant, metavar="TIME", help="requests that arrived then or later")
    parser.add_argument("--until", type=instant, metavar="TIME", help="requests that arrived before")
    parser.add_argument("--model", help="this model's requests only")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write, - for stdout")
    parser.add_argument(
        "--partition",
        choices=("hour",),
        help="Parquet files by hour in the folder or URL (s3://bucket/prefix) that --output names: of hours that are "
        "over, and only what is not there yet",
    )
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="the logger's SQLite file; default: LOGGER_DATABASE_URL or LOGGER_DATABASE, as the logger",
    )
    options = parser.parse_args(arguments)
    if options.partition and (options.format != "parquet" or options.until or options.model or options.output == "-"):
        parser.error("--partition goes with --format parquet, a folder as --output, and no filter but --since")
    return options


@contextmanager
def _open(output: str) -> Iterator[IO[bytes]]:
    """The output file; it gets its name only if the block succeeds."""
    if output == "-":
        if sys.stdout.isatty():
            raise StartupError("--output - is for a pipe, not for a terminal")
        yield sys.stdout.buffer
        return
    with private_file(Path(output), f"--output {output}") as file:
        yield file
