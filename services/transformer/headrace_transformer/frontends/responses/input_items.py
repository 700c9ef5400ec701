"""The items of a request's input, and the messages of a chat that they make.

Reasoning, a message of the assistant and calls of functions that follow each other are one message of the assistant, as
chat templates have it. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationInfo, field_validator, model_validator

from headrace_transformer.frontends.openai.requests import text_of
from headrace_transformer.frontends.openai.tools import TemplateMessage, ToolCall, call_of, json_text, template_message
from headrace_transformer.frontends.responses.items import reasoning_of
from headrace_transformer.frontends.responses.tools import INPUT, function_name

_TEXTS = ("input_text", "output_text", "text")
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Item(BaseModel):
    """One item of the conversation."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: Any = ""
    input: str = ""
    encrypted_content: str | None = None
    output: str = ""

    @field_validator("content", "output", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        is_reasoning = info.data.get("type") == "reasoning"
        return "" if value is None and is_reasoning else text_of(value, ("reasoning_text",) if is_reasoning else _TEXTS)

    @property
    def reasoning(self) -> str:
        """The text of a reasoning item, also of one that has it only as content for the server."""
        return self.content or reasoning_of(self.encrypted_content or "")

    @property
    def call(self) -> ToolCall:
        """The call of an item; raises ValueError."""
        arguments = json_text({INPUT: self.input}) if self.type == "custom_tool_call" else self.arguments
        return call_of(self.call_id, function_name(self.name, self.namespace), arguments)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        missing = [name for name in _NEEDED[self.type] if name not in self.model_fields_set]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {missing[0]}")
        return self


class _Assistant:
    """A message of the assistant that further items may be a part of."""

    def __init__(self, reasoning: str = "", content: str = "") -> None:
        self.reasoning = reasoning
        self.content = content
        self.calls: list[ToolCall] = []

    @property
    def only_reasons(self) -> bool:
        return not (self.content or self.calls)

    @property
    def message(self) -> TemplateMessage:
        return template_message("assistant", self.content, self.calls, reasoning=self.reasoning)


def messages_of(items: Iterable[Item]) -> list[TemplateMessage]:
    """The messages."""
    messages: list[_Assistant | TemplateMessage] = []
    for item in items:
        last = messages[-1] if messages else None
        assistant = last if isinstance(last, _Assistant) else None
        if item.type == "reasoning":
            if item.reasoning:
                messages.append(_Assistant(reasoning=item.reasoning))
        elif item.type in ("function_call", "custom_tool_call"):
            if assistant is None:
                messages.append(assistant := _Assistant())
            assistant.calls.append(item.call)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            messages.append(template_message("tool", item.output, tool_call_id=item.call_id))
        elif item.role == "assistant" and assistant is not None and assistant.only_reasons and assistant.reasoning:
            assistant.content = item.content
        elif item.role == "assistant":
            messages.append(_Assistant(content=item.content))
        else:
            # Chat templates know the older name of `developer`.
            messages.append(("system" if item.role == "developer" else str(item.role), item.content))
    return [message.message if isinstance(message, _Assistant) else message for message in messages]
