"""Tools as Anthropic writes them, and the blocks of messages that are made of their calls: read and checked.

All raises ValueError. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.transformer.frontends.openai.requests import text_of
from services.transformer.frontends.openai.tools import (
    TemplateMessage,
    ToolCall,
    ToolChoice,
    call_of,
    json_text,
    read_tools,
    template_message,
)
from services.transformer.text.tools import ToolFunction

_CHOICES = {
    "auto": ToolChoice(mode="auto"),
    "any": ToolChoice(mode="required"),
    "none": ToolChoice(mode="none"),
}


def read_declarations(value: Any) -> tuple[ToolFunction, ...]:
    """The tools of a request, which the chat template gets as chat completions have them."""
    return read_tools([_function(*one) for one in enumerate(value)] if isinstance(value, list) else value)


def read_choice(choice: Mapping[str, Any]) -> tuple[ToolChoice, bool]:
    """What the model may call, and whether it may call several at once."""
    kind, name = choice.get("type"), choice.get("name")
    is_single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise ValueError("disable_parallel_tool_use must be true or false")
    if kind == "tool" and isinstance(name, str):
        return ToolChoice(mode="required", names=frozenset([name])), not is_single
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ValueError("must be of type auto, any or none, or tool with a name")
    return _CHOICES[kind], not is_single


def messages_of(role: str, blocks: list[Any]) -> list[TemplateMessage]:
    """The messages that one of Anthropic's makes: each result of a tool is one of its own."""
    return [_answer_of(blocks)] if role == "assistant" else _question_of(blocks)


def _question_of(blocks: list[Any]) -> list[TemplateMessage]:
    messages: list[TemplateMessage] = []
    texts: list[Any] = []
    for block in blocks:
        if _kind(block) != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append(("user", _text(texts)))
            texts = []
        content = block.get("content")
        messages.append(template_message("tool", _text(content or ""), call_id=_string(block, "tool_use_id")))
    return [*messages, ("user", _text(texts))] if texts or not messages else messages


def _answer_of(blocks: list[Any]) -> TemplateMessage:
    texts = [block for block in blocks if _kind(block) not in ("thinking", "tool_use")]
    reasoning = "\n".join(_string(block, "thinking") for block in blocks if _kind(block) == "thinking")
    calls = [_call(block) for block in blocks if _kind(block) == "tool_use"]
    return template_message("assistant", _text(texts), calls, reasoning=reasoning)


def _call(block: dict[str, Any]) -> ToolCall:
    values = block.get("input")
    if not isinstance(values, dict):
        raise ValueError("a tool_use block must have an input, which is an object")
    return call_of(_string(block, "id"), _string(block, "name"), json_text(values))


def _function(number: int, tool: Any) -> Any:
    """A tool as chat completions have it."""
    if not isinstance(tool, dict):
        raise ValueError(f"tool {number} is not an object")
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise ValueError(f"tool {number} is of type {str(kind)[:64]!r}; only custom ones are supported")
    if not isinstance(tool.get("input_schema"), dict):
        raise ValueError(f"tool {number}: input_schema must be a JSON schema of an object")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _string(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"a {block['type']} block must have a {name}, which is a string")
    return value


def _text(content: Any) -> str:
    text = text_of(content, part="block")
    if not isinstance(text, str):
        raise ValueError("must be a string or a list of blocks")
    return text
