"""Tools as the Responses API writes them, and the functions that a chat template gets for them.

A function's fields are beside its type, and not in an object of their own. A custom tool, whose input is any text, is a
function of one text. A tool of a namespace has the namespace's name before its own. Tools that OpenAI's servers run
have no function: the model cannot call them, as if it chose not to. Source: OpenAI's API reference.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

CUSTOM = "custom"
INPUT = "input"  # The argument of a custom tool's function.
# What the model may call and need not. Others are refused: they have the caller's data, or the caller runs them.
_NOT_CALLED = ("web_search", "code_interpreter", "image_generation", "tool_search", "local_shell", "shell")
_ONE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class Origin(NamedTuple):
    """The tool that a function stands for, where the function alone does not show it."""

    name: str
    namespace: str = ""
    is_custom: bool = False

    @property
    def place(self) -> dict[str, str]:
        """The fields of a call that name the tool."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


Origins = Mapping[str, Origin]  # By the names of functions.


class Tools(NamedTuple):
    """The `functions` of a request's tools, in the form of chat completions, and what has none."""

    functions: list[Any]
    origins: dict[str, Origin]
    ignored: list[str]


def function_name(name: str, namespace: str | None) -> str:
    """The name of a tool's function."""
    return f"{namespace}__{name}" if namespace else name


def functions_of(tools: Sequence[Any]) -> Tools:
    """The functions; what is no tool, or of another type, stays as it is."""
    found = Tools([], {}, [])
    for tool, namespace in _flattened(tools):
        kind, name = tool.get("type"), tool.get("name")
        if str(kind).startswith(_NOT_CALLED):
            found.ignored.append(f"tools.{kind}")
            continue
        if kind == CUSTOM:
            if _grammar_of(tool):
                found.ignored.append("tools.format")
            tool = {"type": "function", "name": name, "description": _description(tool), "parameters": _ONE_TEXT}
        if isinstance(name, str) and (namespace or kind == CUSTOM):
            tool = {**tool, "name": function_name(name, namespace)}
            found.origins[tool["name"]] = Origin(name, namespace, kind == CUSTOM)
        found.functions.append(nested_tool(tool))
    return found


def _grammar_of(custom: dict[str, Any]) -> dict[str, Any]:
    """The grammar of a custom tool's input; empty for none."""
    form = custom.get("format")
    return form if isinstance(form, dict) and form.get("type") == "grammar" else {}


def _description(custom: dict[str, Any]) -> Any:
    """What the model reads about a custom tool: nothing enforces a grammar, so it gets that too."""
    description, grammar = custom.get("description") or "", _grammar_of(custom)
    if not grammar or not isinstance(description, str):
        return description
    return f"{description}\n\nThe input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"


def _flattened(tools: Sequence[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The tools with their namespaces."""
    for tool in tools:
        inner = tool.get("tools") if isinstance(tool, dict) and tool.get("type") == "namespace" else None
        if isinstance(inner, list):
            yield from ((one, str(tool.get("name"))) for one in inner if isinstance(one, dict))
        else:
            yield (tool, "") if isinstance(tool, dict) else ({}, "")


def nested_tool(tool: Any) -> Any:
    """A tool, or the choice of one, as chat completions have it; what is no function stays as it is."""
    if not isinstance(tool, dict) or tool.get("type") not in ("function", CUSTOM):
        return tool
    fields = {name: value for name, value in tool.items() if name not in ("type", "namespace") and value is not None}
    if "namespace" in tool:
        fields["name"] = function_name(tool.get("name", ""), tool["namespace"])
    return {"type": "function", "function": fields}


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
    if choice["type"] != "allowed_tools":
        return _named(choice)
    return {"type": "allowed_tools", "mode": choice["mode"], "tools": list(map(_named, choice["tools"]))}


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("type", "name", "namespace") if name in tool}


def flat_tool(definition: str, origins: Origins) -> dict[str, Any]:
    """A tool by its function's declaration, which is JSON text in the form of chat completions."""
    function = orjson.loads(definition)["function"]
    origin = origins.get(function["name"], Origin(function["name"]))
    if origin.is_custom:
        tool = {"type": CUSTOM, "description": function.get("description", ""), "format": {"type": "text"}}
    else:
        tool = {"type": "function", "parameters": None, "strict": False, **function}
    tool["name"] = origin.name
    if not origin.namespace:
        return tool
    return {"type": "namespace", "name": origin.namespace, "description": "", "tools": [tool]}
