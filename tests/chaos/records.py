"""Compares the payload log with what callers received.

Every request that its caller saw begin has one record, which contains what the caller received. A retry of the
same request, which the gateway makes if the transformer disappears, or for a direct call its predictor, has a
record of its own. The excuses are the oracle's, and two more: requests during a full disk may have no record, and of
an answer that a killed transformer was streaming the last chunks may be missing.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace_protos.headrace_pb2 import PayloadRecord
from tests.chaos.load import OK, Call
from tests.chaos.oracle import EXCUSED, Oracle, Span
from tests.chaos.requests import DIRECT_WAYS, TEXT_WAYS

LOSABLE_MS = 50.0  # Chunks of this time before the transformer's kill may be lost.
Records = Mapping[str, Sequence[PayloadRecord]]


def stored(database: Path) -> Records:
    """The records of each request id, without those of the gateway."""
    found: dict[str, list[PayloadRecord]] = defaultdict(list)
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        for request_id, body in connection.execute("SELECT request_id, body FROM records WHERE NOT of_call"):
            found[request_id].append(PayloadRecord.FromString(body))
    return found


@dataclass
class Findings:
    """The results of the comparison; each text names the request."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost_on_full_disk: int = 0
    resumed: int = 0
    resumes: int = 0
    latest_lost_chunk_ms: float = 0.0  # Before the kill.


def is_seen(call: Call) -> bool:
    """Whether the caller saw the transformer take the request; a status for its absence is not its own."""
    return bool(call.pieces) or call.status == OK or (call.hop == "transformer" and call.status not in EXCUSED)


def compare(
    calls: Iterable[Call],
    records: Records,
    oracle: Oracle,
    *,
    excuses: Sequence[Span] = (),
    kills: Sequence[Span] = (),
    predictors: Sequence[Span] = (),
    full_disk: Sequence[Span] = (),
) -> Findings:
    """`excuses`: when the gateway or the transformer was away; `kills`: those of them after the transformer's kill.

    `predictors`: when one of the predictors was away.
    """
    findings = Findings()
    for call in calls:
        name = call.request.name
        own = records.get(name, ())
        findings.resumed += any(record.resumes for record in own)
        findings.resumes += sum(record.resumes for record in own)
        # The end of an answer may be among the last chunks, too.
        killed = [span for span in kills if Span(span.since - LOSABLE_MS / 1000, span.until).meets(call)]
        excused = bool(killed) or any(span.meets(call) for span in excuses)
        disk_was_full = any(span.meets(call) for span in full_disk)
        if not own:
            if is_seen(call):
                if disk_was_full:
                    findings.lost_on_full_disk += 1
                else:
                    findings.lost.append(f"{call.request}: {call.status} after {len(call.pieces)} pieces, no record")
            continue
        statuses = [record.status for record in own]
        repeated = excused or (call.request.way in DIRECT_WAYS and any(span.meets(call) for span in predictors))
        if len(own) > 1 and (not repeated or statuses.count("OK") > 1):
            findings.doubled.append(f"{call.request}: {statuses}")
        if call.request.way not in TEXT_WAYS or (any(record.incomplete for record in own) and disk_was_full):
            continue
        reason = _wrong_text(call, own, oracle, excused, killed, findings)
        if reason:
            findings.wrong.append(f"{call.request}: {reason}")
    return findings


def _wrong_text(
    call: Call, own: Sequence[PayloadRecord], oracle: Oracle, excused: bool, kills: Sequence[Span], findings: Findings
) -> str:
    right = oracle.answers[call.request.required_story].text
    for record in own:
        if record.text != "".join(chunk.text for chunk in record.chunks):
            return "its chunks are not its text"
        if not right.startswith(record.text) or (record.status == "OK" and record.text != right):
            return f"{record.status} with the text {record.text!r}, of {right!r}"
    longest = max(own, key=lambda record: len(record.text))
    if call.status == OK and not call.left and "OK" not in {record.status for record in own} and not excused:
        return f"the caller got all, the record says {longest.status}"
    missing = len(call.text) - len(longest.text)
    if missing <= 0:
        return ""
    if not kills:
        return f"the caller got {missing} characters that are not in it"
    lost_ms = _latest_loss_ms(call, len(longest.text), kills)
    findings.latest_lost_chunk_ms = max(findings.latest_lost_chunk_ms, lost_ms)
    return f"a chunk of {lost_ms:.0f} ms before the kill is not in it" if lost_ms > LOSABLE_MS else ""


def _latest_loss_ms(call: Call, recorded: int, kills: Sequence[Span]) -> float:
    """How long before a kill the caller received the first unrecorded piece, which was sent even earlier."""
    characters = 0
    for piece in call.pieces:
        characters += len(piece.text)
        if characters > recorded:
            return min(max(0.0, (kill.since - piece.at) * 1000) for kill in kills)
    return 0.0
