"""The parts of an answer in messages and deltas of chat completions.

Reasoning has two names: `reasoning`, vLLM's, and `reasoning_content`, which DeepSeek's API has and vLLM had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole message, without its role; the content is null if there is none beside calls or reasoning."""
    delta = delta_of(parts)
    has_others = bool(delta.keys() - {"content"})
    calls = delta.pop("tool_calls", None)
    message: dict[str, Any] = {"content": delta.pop("content", None if has_others else ""), **delta}
    if calls is not None:
        message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return message


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A delta, without the role; a call has its id, type and name in its first one."""
    delta: dict[str, Any] = {}
    if content := "".join(part.text for part in parts if isinstance(part, Content)):
        delta["content"] = content
    if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.number] = {"index": part.number, "id": part.id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.number, {"index": part.number, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def has_call(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, CallStart) for part in parts)
