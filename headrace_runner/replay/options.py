"""The options of `headrace replay`, the run that they describe, what it prints, and the file of its JSON report.

Texts of models are made safe for terminals.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import StartupError
from headrace.files import private_file
from headrace_runner.gateway import Gateway
from headrace_runner.replay.records import LoggedStream, of_file, of_stack
from headrace_runner.replay.replay import FailedError, Replay, Target
from headrace_runner.replay.results import TROUBLE, Difference, Results, summary
from headrace_runner.terminal import BOLD, GREEN, RED, Painter, has_colours, one_line, printable

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

_WIDTH = 200  # Characters of a failure's message.
_SHOWN = 12  # Characters of a fingerprint.


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
        "--concurrency", type=up_to(_MAX_CONCURRENCY), default=CONCURRENCY, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--limit",
        type=up_to(_MAX_LIMIT),
        default=LIMIT,
        metavar="N",
        help="replay at most this many streams, of a stack the newest (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=TIMEOUT_S, metavar="SECONDS", help="of one stream (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")


def replay(options: argparse.Namespace, gateway: str) -> int:
    """Runs a replay and prints its report; returns the exit code. Raises StartupError.

    `gateway` is the stack whose payload log is read; `options` are those of `add_options` and `since`.
    """
    if options.out:
        check_writable(options.out)
    paint = Painter(has_colours(sys.stdout, os.environ))

    def found(logged: LoggedStream, finding: Difference | FailedError) -> None:
        print("\n".join(found_lines(logged, finding, paint)), flush=True)

    with closing(Gateway(gateway)) as source, closing(Target(options.against, options.timeout)) as target:
        target.check()
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
        results = run.run(records)
        seconds = time.monotonic() - begun
    print("\n".join(summary_lines(results, paint)))
    if options.out:
        write_json(options.out, _about(options, gateway, seconds) | results.as_dict())
    return results.exit_code


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


def up_to(most: int) -> Callable[[str], int]:
    """The type of an argument from 1 to a maximum."""

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


def found_lines(logged: LoggedStream, found: Difference | FailedError, paint: Painter) -> list[str]:
    """The lines about one stream that differs or has failed."""
    request_id, model = one_line(logged.record.request_id, 64), one_line(logged.request.model, 64)
    names = f"record {one_line(logged.record.record_id, 64)}  request {request_id}  model {model}"
    if isinstance(found, FailedError):
        return [f"{paint(RED, 'failed')}     {names}", f"  {found.status}: {one_line(str(found), _WIDTH)}"]
    return [
        f"{paint(RED, 'different')}  {names}",
        f"  {_place(found)}: {_shown(found.recorded)} on record, {_shown(found.replayed)} now",
        f"  on record  {_text(found.recorded_text)}",
        f"  now        {_text(found.replayed_text)}",
    ]


def summary_lines(results: Results, paint: Painter) -> list[str]:
    """Totals, times and fingerprints."""
    reasons = results.not_comparable
    statuses = Counter(failure["status"] for failure in results.failed)
    lines = [
        _count("same", results.same, {}),
        _count("different", len(results.different), {}),
        _count("failed", len(results.failed), statuses),
        _count("not comparable", sum(reasons.values()), reasons),
    ]
    if results.limit_reached:
        lines.append("there are more records: --limit has been reached")
    times = {"first token, ms": results.ttft, "whole, ms": results.duration}
    if any(times.values()):
        lines.append(f"{'':<16} {'on record p50':>14} {'p95':>9} {'now p50':>9} {'p95':>9}")
    for name, pairs in times.items():
        if pairs:
            both = summary(pairs)
            cells = [both[side][rank] for side in ("recorded", "replayed") for rank in ("p50", "p95")]
            lines.append(f"{name:<16} {cells[0]:>14.1f} " + " ".join(f"{cell:>9.1f}" for cell in cells[1:]))
    lines += _weights(results.fingerprints())
    colour = RED if results.exit_code else GREEN
    return [*lines, paint(BOLD, paint(colour, _verdict(results)))]


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the report; the file appears under its name when it is complete, and only its owner can read it.

    Raises StartupError.
    """
    with private_file(path, f"{path} cannot be written") as file:
        file.write(json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n")


def check_writable(path: Path) -> None:
    """Raises StartupError if the report could not be written later."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StartupError(f"{path} cannot be written: it is a folder, or its folder is missing or read-only")


def _place(found: Difference) -> str:
    unit = "character" if found.kind == "text" else "token"
    return f"end after {found.position} tokens" if found.kind == "end" else f"{unit} {found.position}"


def _shown(value: int | str | None) -> str:
    if value is None:
        return "no more"
    return printable(repr(value)) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    return f'"{printable(text, keep="").replace(chr(34), chr(39))}"'


def _count(name: str, number: int, parts: dict[str, int]) -> str:
    listed = ", ".join(f"{part}: {count}" for part, count in sorted(parts.items(), key=lambda item: -item[1]))
    return f"{name:<16} {number:>6}" + (f"  {listed}" if listed else "")


def _weights(fingerprints: dict[str, Any]) -> Iterable[str]:
    for model, sides in fingerprints.items():
        if set(sides["recorded"]) != {sides["replayed"]}:
            recorded = ", ".join(f"{printable(each[:_SHOWN])} ({count})" for each, count in sides["recorded"].items())
            yield f"weights of {model}: {recorded} on record, {sides['replayed'][:_SHOWN] or 'unknown'} now"


def _verdict(results: Results) -> str:
    if results.exit_code == TROUBLE:
        return "nothing was compared"
    if results.exit_code:
        return "not the same"
    return f"the same: {results.same} streams, token by token"
