"""The input of a response on record, as the items of a list. Source: OpenAI's API reference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.openai.tools import TemplateMessage, json_text
from headrace_transformer.frontends.responses.items import ItemFields, output_of
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def input_items(response_id: str, messages: Iterable[TemplateMessage], fields: ItemFields) -> list[dict[str, Any]]:
    """The items that the messages of a chat are made of, oldest first."""
    items: list[dict[str, Any]] = []
    for number, (role, content, *further) in enumerate(messages):
        extra: dict[str, Any] = json.loads(further[0]) if further else {}
        own = f"in{number}_{response_id.removeprefix('resp_')}"
        if role == "assistant":
            items += output_of(own, _parts_of(content, extra), "completed", fields)
        elif role == "tool":
            output = {"id": f"fco_{own}", "type": "function_call_output", "status": "completed", "output": content}
            items.append(output | {"call_id": extra.get("tool_call_id", "")})
        else:
            text = {"type": "input_text", "text": content}
            item = {"id": f"msg_{own}", "type": "message", "status": "completed", "role": role}
            items.append(item | {"content": [text]})
    return items


def page_of(items: Sequence[dict[str, Any]], limit: int, order: str, after: str) -> dict[str, Any]:
    """A part of a list: at most `limit` items behind the one with the id `after`, the newest first by default."""
    if order not in ("", "asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    if limit > _MAX_LIMIT:
        raise InvalidRequestError(f"limit must be from 1 to {_MAX_LIMIT}", param="limit")
    ordered = list(items if order == "asc" else reversed(items))
    begins = next((place for place, item in enumerate(ordered, start=1) if item["id"] == after), None)
    if after and begins is None:
        raise InvalidRequestError(f"there is no item {after[:64]!r}", param="after")
    rest = ordered[begins or 0 :]
    data = rest[: limit or _DEFAULT_LIMIT]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(rest) > len(data)}


def _parts_of(content: str, extra: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an answer that make a message of the assistant."""
    if reasoning := extra.get("reasoning_content"):
        yield Reasoning(reasoning)
    calls = extra.get("tool_calls", ())
    if content or not calls:
        yield Content(content)
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = function["arguments"]
        yield CallStart(number, call["id"], function["name"])
        yield CallArguments(number, arguments if isinstance(arguments, str) else json_text(arguments))
