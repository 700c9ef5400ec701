"""What a replay prints, and the file of its JSON report. Texts of models are made safe for terminals."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.errors import StartupError
from headrace.files import private_file
from headrace_runner.replay.records import LoggedStream
from headrace_runner.replay.replay import FailedError
from headrace_runner.replay.results import TROUBLE, Difference, Results
from headrace_runner.terminal import BOLD, GREEN, RED, Painter, one_line, printable

_WIDTH = 200  # Characters of a failure's message.
_SHOWN = 12  # Characters of a fingerprint.


def found_lines(logged: LoggedStream, found: Difference | FailedError, paint: Painter) -> list[str]:
    """The lines about one stream that differs or has failed."""
    request_id, model = one_line(logged.request_id, 64), one_line(logged.request.model, 64)
    names = f"record {one_line(logged.record_id, 64)}  request {request_id}  model {model}"
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
    if any(each.recorded for each in times.values()):
        lines.append(f"{'':<16} {'on record p50':>14} {'p95':>9} {'now p50':>9} {'p95':>9}")
    for name, each in times.items():
        if each.recorded:
            both = each.summary()
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
