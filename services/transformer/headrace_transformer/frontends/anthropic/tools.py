"""Tools as Anthropic writes them: read and checked.

All raises ValueError. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_transformer.frontends.openai.tools import ToolChoice, read_tools
from headrace_transformer.text.tools import ToolFunction

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


def _function(number: int, tool: Any) -> Any:
    """A tool as chat completions have it."""
    if not isinstance(tool, dict):
        raise ValueError(f"tool {number} is not an object")
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise ValueError(f"tool {number} is of type {str(kind)[:64]!r}; only custom ones are supported")
    if not isinstance(tool.get("input_schema"), dict):
        raise ValueError(f"tool {number}: input_schema must be a JSON schema of an object")
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
