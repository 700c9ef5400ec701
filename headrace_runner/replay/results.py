"""Compares a recorded answer with its replay, and sums up: counts, differences, failures, times and fingerprints; pure.

Percentiles are of the streams that have a figure on both sides. Durations are those of whole answers without a `pace`;
the recorded ones were measured by the server, those of the replay by its caller. Milliseconds.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from headrace_runner.replay.records import LoggedStream

_BEFORE, _AFTER = 40, 40  # Characters of text around a difference.

SAME, DIFFERENT, TROUBLE = 0, 1, 2  # The exit codes, as diff(1) has them.


@dataclass(frozen=True)
class Answer:
    """The answer of the other stack; `ttft_ms` is the server's own figure, None if it gave none."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    ttft_ms: float | None
    duration_ms: float


@dataclass(frozen=True)
class Difference:
    """The first difference between two answers.

    `kind` is "token", "end" (the same tokens, another finish_reason) or "text" (the same tokens, or unknown ones).
    `position` counts from 0: tokens of the answer, of "text" characters. `recorded` and `replayed` are what differs:
    token ids or finish reasons, None where an answer has ended. The texts are those around their first difference.
    """

    kind: str
    position: int
    recorded: int | str | None
    replayed: int | str | None
    recorded_text: str
    replayed_text: str


def compare(logged: LoggedStream, answer: Answer) -> Difference | None:
    """The first difference, None if the answers are the same; an answer that was cut off must be the beginning."""
    token_ids = answer.token_ids if logged.is_whole else answer.token_ids[: len(logged.token_ids)]
    if logged.token_ids and token_ids != logged.token_ids:
        at = _first_difference(logged.token_ids, token_ids)
        return _difference("token", at, _item(logged.token_ids, at), _item(token_ids, at), logged, answer)
    if logged.is_whole and answer.finish_reason != logged.record.finish_reason:
        at = len(answer.token_ids)
        return _difference("end", at, logged.record.finish_reason, answer.finish_reason, logged, answer)
    # What an answer that was cut off had of its text lags behind its tokens.
    text = answer.text if logged.is_whole else answer.text[: len(logged.text)]
    if text != logged.text:
        at = _first_difference(logged.text, text)
        return _difference("text", at, _item(logged.text, at), _item(text, at), logged, answer)
    return None


def _difference(
    kind: str, at: int, recorded: int | str | None, replayed: int | str | None, logged: LoggedStream, answer: Answer
) -> Difference:
    around = _first_difference(logged.text, answer.text)
    return Difference(kind, at, recorded, replayed, _around(logged.text, around), _around(answer.text, around))


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (first, second) in enumerate(pairs) if first != second), min(len(one), len(other)))


def _item(values: Sequence[int] | str, at: int) -> int | str | None:
    return values[at] if at < len(values) else None


def _around(text: str, at: int) -> str:
    begin = max(0, at - _BEFORE)
    return f"{'…' if begin else ''}{text[begin : at + _AFTER]}{'…' if len(text) > at + _AFTER else ''}"


class Results:
    """Owned by one task at a time."""

    def __init__(self) -> None:
        self.same = 0
        self.different: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.not_comparable: Counter[str] = Counter()
        self.limit_reached = False
        self.ttft: list[tuple[float, float]] = []
        self.duration: list[tuple[float, float]] = []
        self._recorded_weights: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.weights: dict[str, str] = {}  # Fingerprints at the other stack, by model.

    @property
    def exit_code(self) -> int:
        if self.different or self.failed:
            return DIFFERENT
        return SAME if self.same else TROUBLE

    def add(self, logged: LoggedStream, answer: Answer, difference: Difference | None) -> None:
        if difference is None:
            self.same += 1
        else:
            self.different.append(_names(logged) | asdict(difference) | {"prefix_only": not logged.is_whole})
        if answer.ttft_ms is not None:
            self.ttft.append((logged.record.ttft_ms, answer.ttft_ms))
        if logged.is_whole and not logged.is_paced:
            self.duration.append((logged.record.duration_ms, answer.duration_ms))

    def add_failure(self, logged: LoggedStream, status: str, message: str) -> None:
        self.failed.append(_names(logged) | {"status": status, "message": message})

    def add_weights(self, logged: LoggedStream) -> None:
        """Counts the fingerprint of a stream that is replayed."""
        self._recorded_weights[logged.request.model][logged.record.fingerprint] += 1

    def fingerprints(self) -> dict[str, Any]:
        """For each model the recorded fingerprints with their streams, and the one of the other stack."""
        return {
            model: {"recorded": dict(counts), "replayed": self.weights.get(model, "")}
            for model, counts in sorted(self._recorded_weights.items())
        }

    def as_dict(self) -> dict[str, Any]:
        """The contents of the JSON report."""
        statuses = Counter(failure["status"] for failure in self.failed)
        return {
            "exit_code": self.exit_code,
            "replayed": self.same + len(self.different) + len(self.failed),
            "same": self.same,
            "different": len(self.different),
            "failed": dict(statuses.most_common()),
            "not_comparable": dict(self.not_comparable.most_common()),
            "limit_reached": self.limit_reached,
            "ttft_ms": summary(self.ttft),
            "duration_ms": summary(self.duration),
            "fingerprints": self.fingerprints(),
            "differences": self.different,
            "failures": self.failed,
        }


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The number of pairs of figures, recorded and replayed, and the percentiles of both sides."""
    sides = zip(*pairs, strict=True) if pairs else ((), ())
    named = zip(("recorded", "replayed"), map(percentiles, sides), strict=True)
    return {"streams": len(pairs)} | dict(named)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The 50th and the 95th; None without values."""
    if len(values) < 2:
        only = values[0] if values else None
        return {"p50": only, "p95": only}
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94]}


def _names(logged: LoggedStream) -> dict[str, Any]:
    return {
        "record_id": logged.record.record_id,
        "request_id": logged.record.request_id,
        "replay_request_id": logged.request.request_id,
        "model": logged.request.model,
    }
