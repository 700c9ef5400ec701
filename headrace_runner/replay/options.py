"""The options of `headrace replay`, and the run that they describe."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from headrace.errors import StartupError
from headrace_runner.replay import report
from headrace_runner.replay.records import LoggedStream, of_file, of_stack
from headrace_runner.replay.replay import FailedError, Replay, Target, open_channel
from headrace_runner.replay.results import TROUBLE, Difference
from headrace_runner.terminal import Painter, has_colours

CONCURRENCY, LIMIT, TIMEOUT_S = 8, 10_000, 120.0
_MAX_CONCURRENCY, _MAX_LIMIT = 1024, 1_000_000

HELP = """Runs logged generations again at the stack AGAINST, with the same prompt ids, seeds and parameters, and
compares the answers token by token: a gate before an upgrade of weights, code or hardware. As `make replay`.

  headrace replay 127.0.0.1:9080 --since 1h             the last hour of the stack at --gateway
  headrace replay 127.0.0.1:9080 --from payloads.jsonl  the records of an export
  headrace replay 127.0.0.1:9080 --model chat --out report.json

Each record that cannot be replayed is counted with its reason. An answer that was cancelled or failed is replayed up
to its last token. The requests have the id replay-RECORD_ID; records of such requests are never replayed.

Exit code, as diff has it: 0 if all replayed streams are the same, 1 if one differs or fails, 2 for wrong arguments, if
records cannot be read or AGAINST does not answer, or if no stream can be compared; 130 after Ctrl-C."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options, except --gateway and --since."""
    parser.add_argument(
        "against", type=_address, metavar="AGAINST", help="host:port of the gateway where the streams run again"
    )
    parser.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="JSON lines of an export, instead of a stack's log"
    )
    parser.add_argument("--model", help="only records of this model, as its caller named it")
    parser.add_argument(
        "--from-text",
        action="store_true",
        help="send the prompts' texts and messages instead of their ids: compares tokenizer and chat template too",
    )
    parser.add_argument(
        "--concurrency", type=_up_to(_MAX_CONCURRENCY), default=CONCURRENCY, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--limit",
        type=_up_to(_MAX_LIMIT),
        default=LIMIT,
        metavar="N",
        help="replay at most this many streams, of a stack the newest (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=TIMEOUT_S, metavar="SECONDS", help="of one stream (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")


async def replay(options: argparse.Namespace, gateway: str) -> int:
    """Runs a replay and prints its report; returns the exit code. Raises StartupError.

    `gateway` is the stack whose payload log is read; `options` are those of `add_options` and `since`.
    """
    if options.out:
        report.check_writable(options.out)
    paint = Painter(has_colours(sys.stdout, os.environ))

    def found(logged: LoggedStream, finding: Difference | FailedError) -> None:
        print("\n".join(report.found_lines(logged, finding, paint)), flush=True)

    source = open_channel(gateway)
    against = open_channel(options.against)
    try:
        target = Target(options.against, against, options.timeout)
        await target.check()
        run = Replay(
            target,
            concurrency=options.concurrency,
            limit=options.limit,
            from_text=options.from_text,
            found=found,
        )
        begun = time.monotonic()
        if options.file:
            records = of_file(options.file, options.since, options.model)
        else:
            records = of_stack(source, options.since, options.model)
        results = await run.run(records)
        seconds = time.monotonic() - begun
    finally:
        await source.close()
        await against.close()
    print("\n".join(report.summary_lines(results, paint)))
    if options.out:
        report.write_json(options.out, _about(options, gateway, seconds) | results.as_dict())
    return results.exit_code


def run(options: argparse.Namespace, gateway: str) -> int:
    """`replay`, with errors as one line on standard error and exit code 2."""
    try:
        return asyncio.run(replay(options, gateway))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return TROUBLE


def _about(options: argparse.Namespace, gateway: str, seconds: float) -> dict[str, object]:
    since: datetime | None = options.since
    return {
        "source": str(options.file or gateway),
        "against": options.against,
        "since": since and since.isoformat(),
        "model": options.model,
        "from_text": options.from_text,
        "concurrency": options.concurrency,
        "seconds": seconds,
    }


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return text


def _up_to(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and {most}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
