"""Compares a recorded answer with its replay; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_runner.replay.selection import LoggedStream

_BEFORE, _AFTER = 40, 40  # Characters of text around a difference.


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
    if logged.is_whole and answer.finish_reason != logged.finish_reason:
        at = len(answer.token_ids)
        return _difference("end", at, logged.finish_reason, answer.finish_reason, logged, answer)
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
