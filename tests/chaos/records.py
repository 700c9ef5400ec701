"""Holds the payload log against what callers were told.

Every request of which its caller saw anything has one record, in which stands what the caller got. Another try of the
same request, which the gateway makes where the transformer breaks off, has a record of its own. The excuses are
the oracle's, and two more: what was asked while the disk was full may be missing, and of an answer that the killed
transformer was telling the last chunks may be.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace_protos.millrace_pb2 import PayloadRecord
from tests.chaos.asks import TEXT_WAYS
from tests.chaos.load import OK, Told
from tests.chaos.oracle import EXCUSED, Oracle, Span

LOSABLE_MS = 50.0  # Of chunks, before the transformer was killed.
Records = Mapping[str, Sequence[PayloadRecord]]


def stored(database: Path) -> Records:
    """Of each request id its records, but those that only the gateway tells of."""
    found: dict[str, list[PayloadRecord]] = defaultdict(list)
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        for request_id, body in connection.execute("SELECT request_id, body FROM records WHERE NOT of_call"):
            found[request_id].append(PayloadRecord.FromString(body))
    return found


@dataclass
class Findings:
    """What the comparison found; each text names the request."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost_on_full_disk: int = 0
    resumed: int = 0
    resumes: int = 0
    latest_lost_chunk_ms: float = 0.0  # Before the kill.


def is_seen(told: Told) -> bool:
    """Whether the caller saw the transformer take the request; it is not the one who says that it is away."""
    return bool(told.pieces) or told.status == OK or (told.hop == "transformer" and told.status not in EXCUSED)


def compare(
    all_told: Iterable[Told],
    records: Records,
    oracle: Oracle,
    excuses: Sequence[Span],
    kills: Sequence[Span],
    full_disk: Sequence[Span],
) -> Findings:
    """`excuses`: when the gateway or the transformer was away; `kills`: when that was the transformer's kill."""
    findings = Findings()
    for told in all_told:
        name = told.ask.name
        own = records.get(name, ())
        findings.resumed += any(record.resumes for record in own)
        findings.resumes += sum(record.resumes for record in own)
        # The end of an answer may be among the last chunks, too.
        killed = [span for span in kills if Span(span.since - LOSABLE_MS / 1000, span.until).meets(told)]
        excused = bool(killed) or any(span.meets(told) for span in excuses)
        disk_was_full = any(span.meets(told) for span in full_disk)
        if not own:
            if is_seen(told):
                if disk_was_full:
                    findings.lost_on_full_disk += 1
                else:
                    findings.lost.append(f"{told.ask}: {told.status} after {len(told.pieces)} pieces, no record")
            continue
        statuses = [record.status for record in own]
        if len(own) > 1 and (not excused or statuses.count("OK") > 1):
            findings.doubled.append(f"{told.ask}: {statuses}")
        if told.ask.way not in TEXT_WAYS or (any(record.incomplete for record in own) and disk_was_full):
            continue
        reason = _wrong_text(told, own, oracle, excused, killed, findings)
        if reason:
            findings.wrong.append(f"{told.ask}: {reason}")
    return findings


def _wrong_text(
    told: Told,
    own: Sequence[PayloadRecord],
    oracle: Oracle,
    excused: bool,
    kills: Sequence[Span],
    findings: Findings,
) -> str:
    right = oracle.answers[told.ask.told].text
    for record in own:
        if record.text != "".join(chunk.text for chunk in record.chunks):
            return "its chunks are not its text"
        if not right.startswith(record.text) or (record.status == "OK" and record.text != right):
            return f"{record.status} with the text {record.text!r}, of {right!r}"
    longest = max(own, key=lambda record: len(record.text))
    if told.status == OK and not told.left and "OK" not in {record.status for record in own} and not excused:
        return f"the caller got all, the record says {longest.status}"
    missing = len(told.text) - len(longest.text)
    if missing <= 0:
        return ""
    if not kills:
        return f"the caller got {missing} characters that are not in it"
    lost_ms = _latest_loss_ms(told, len(longest.text), kills)
    findings.latest_lost_chunk_ms = max(findings.latest_lost_chunk_ms, lost_ms)
    return f"a chunk of {lost_ms:.0f} ms before the kill is not in it" if lost_ms > LOSABLE_MS else ""


def _latest_loss_ms(told: Told, recorded: int, kills: Sequence[Span]) -> float:
    """How long before a kill the caller had the first piece that is not recorded; it was sent before that."""
    characters = 0
    for piece in told.pieces:
        characters += len(piece.text)
        if characters > recorded:
            return min(max(0.0, (kill.since - piece.at) * 1000) for kill in kills)
    return 0.0
