"""Tools as the Responses API writes them: a function's fields are beside its type, and not in an object of their own.

Source: OpenAI's API reference.
"""

from __future__ import annotations

from typing import Any

import orjson


def nested_tool(tool: Any) -> Any:
    """A tool, or the choice of one, as chat completions have it; what is no function stays as it is."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def nested_choice(choice: Any) -> Any:
    """`tool_choice` as chat completions have it."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return nested_tool(choice)
    allowed = {name: value for name, value in choice.items() if name != "type"}
    if isinstance(tools := allowed.get("tools"), list):
        allowed["tools"] = list(map(nested_tool, tools))
    return {"type": "allowed_tools", "allowed_tools": allowed}


def written_choice(choice: Any) -> Any:
    """A `tool_choice` that was checked, as a response has it."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        return _named(choice)
    return {"type": "allowed_tools", "mode": choice["mode"], "tools": list(map(_named, choice["tools"]))}


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "name": tool["name"]}


def flat_tool(definition: str) -> dict[str, Any]:
    """The declaration of a function, which is JSON text in the form of chat completions."""
    return {"type": "function", "parameters": None, "strict": False, **orjson.loads(definition)["function"]}
