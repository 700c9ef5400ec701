"""Tools of a chat, and the messages that are made of their calls: read and checked.

A function's declaration is kept as JSON text, as it goes into the chat template. All raises ValueError.
Source: OpenAI's API reference.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from headrace_transformer.frontends.openai.errors import fault_of
from headrace_transformer.frontends.openai.nulls import without_nulls
from headrace_transformer.text.tools import ToolFunction, ToolUse

MAX_TOOLS = 128  # OpenAI's limit.
MAX_TOOLS_BYTES = 512 * 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_ANY_ARGUMENTS = {"type": "object"}

TemplateMessage = tuple[str, str] | tuple[str, str, str]

_ModelT = TypeVar("_ModelT", bound=BaseModel)


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class _NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: _Named


class _AllowedTools(BaseModel):
    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: list[_NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolChoice(BaseModel):
    """What the model may call: `mode`, and the names of the functions, None for all of them."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None

    def use(self, functions: tuple[ToolFunction, ...], is_parallel: bool) -> ToolUse | None:
        """The functions that may be called, None for none."""
        if not functions and self.mode == "required":
            raise ValueError("needs tools")
        if self.mode == "none" or not functions:
            return None
        if self.names is not None and (unknown := self.names - {function.name for function in functions}):
            raise ValueError(f"names {min(unknown)[:64]!r}, which is not among the tools")
        allowed = tuple(function for function in functions if self.names is None or function.name in self.names)
        return ToolUse(allowed, self.mode == "required", is_parallel)


class CalledFunction(BaseModel):
    """What a call names, and its arguments."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    arguments: str = ""

    @field_validator("arguments", mode="before")
    @classmethod
    def _read_arguments(cls, value: Any) -> Any:
        """The text as it is, whatever a model wrote; what is no text becomes JSON."""
        return value if isinstance(value, str) else "" if value is None else json_text(value)


class ToolCall(BaseModel):
    """A call in a message of the assistant."""

    model_config = ConfigDict(strict=True)

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction


def call_of(call_id: str, name: str, arguments: Any) -> ToolCall:
    """A call in a message of the assistant."""
    return _validated(ToolCall, {"id": call_id, "function": {"name": name, "arguments": arguments}})


def template_message(
    role: str, content: str, calls: Sequence[ToolCall] = (), reasoning: str | None = None, **others: str | None
) -> TemplateMessage:
    """Role, content and, if there are any, the further fields that a chat template takes, as a JSON object."""
    fields: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    if calls:
        fields["tool_calls"] = [call.model_dump() for call in calls]
    if reasoning:
        fields["reasoning_content"] = reasoning
    return (role, content, json_text(fields)) if fields else (role, content)


def as_function(value: Any) -> dict[str, Any]:
    """A function of OpenAI's older API, or the name of one, as `tools` and `tool_choice` have it."""
    return {"type": "function", "function": value}


def read_tools(value: Any) -> tuple[ToolFunction, ...]:
    """The functions of a request."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"must be a list of at most {MAX_TOOLS} tools")
    functions = tuple(_function(number, tool) for number, tool in enumerate(value))
    if len({function.name for function in functions}) < len(functions):
        raise ValueError("two functions have the same name")
    if sum(len(function.definition) for function in functions) > MAX_TOOLS_BYTES:
        raise ValueError(f"more than {MAX_TOOLS_BYTES} characters of JSON are not supported")
    return functions


def read_tool_choice(value: Any) -> ToolChoice:
    """`none`, `auto`, `required`, a function, or some of the functions that may or must be called."""
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(mode=value)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = _validated(_AllowedTools, value.get("allowed_tools"))
        return ToolChoice(mode=allowed.mode, names=frozenset(tool.function.name for tool in allowed.tools))
    if isinstance(value, dict) and value.get("type") == "function":
        return ToolChoice(mode="required", names=frozenset([_validated(_NamedFunction, value).function.name]))
    raise ValueError("must be none, auto, required, a function or allowed_tools")


Tools = Annotated[tuple[ToolFunction, ...], BeforeValidator(read_tools)]
Choice = Annotated[ToolChoice, BeforeValidator(read_tool_choice)]


def _validated(cls: type[_ModelT], value: Any) -> _ModelT:
    try:
        return cls.model_validate(without_nulls(value, cls))
    except ValidationError as error:
        raise ValueError(": ".join(fault_of(error))) from None


def _function(number: int, tool: Any) -> ToolFunction:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        kind = tool.get("type") if isinstance(tool, dict) else None
        of_type = f" of type {kind[:64]!r}" if isinstance(kind, str) and kind != "function" else " malformed"
        raise ValueError(f"tool {number} is{of_type}; only functions are supported")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"tool {number}: a name must have 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"tool {number}: the description must be a string")
    if not isinstance(parameters, dict | None):
        raise ValueError(f"tool {number}: the parameters must be a JSON schema of an object")
    if function.get("strict") not in (None, True, False):
        raise ValueError(f"tool {number}: strict must be true or false")
    schema = json_text(parameters or _ANY_ARGUMENTS)
    return ToolFunction(name, json_text(tool), schema, function.get("strict") is True)


def json_text(value: Any) -> str:
    """JSON; what is nested too deep for it raises ValueError."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
