"""Requests for responses: a text or items, of which messages with text, reasoning and calls are served.

Beside OpenAI's fields those of the sampling table are read. Source: OpenAI's API reference.

Reasoning, a message of the assistant and calls of functions that follow each other are one message of the assistant, as
chat templates have it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headrace.errors import InvalidRequestError
from headrace.sampling import MAX_TOP_LOGPROBS
from headrace_transformer.frontends.openai.chat_prompts import TemplateRequest
from headrace_transformer.frontends.openai.requests import SCORELESS, Effort, SampledRequest, effort_variables, text_of
from headrace_transformer.frontends.openai.structured_outputs import structured_outputs_of
from headrace_transformer.frontends.openai.tools import (
    TemplateMessage,
    ToolCall,
    call_of,
    json_text,
    read_tool_choice,
    read_tools,
    template_message,
)
from headrace_transformer.frontends.responses.items import reasoning_of
from headrace_transformer.frontends.responses.tools import INPUT, Origins, function_name, functions_of, nested_choice
from headrace_transformer.generation.requests import check_message_count
from headrace_transformer.text.tools import ToolFunction

_PLAIN_TEXT = {"type": "text"}
_MAX_INCLUDED = 32
_LOGPROBS, _ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
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


@dataclass
class _Assistant:
    """A message of the assistant that further items may be a part of."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

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
        elif item.role == "assistant":
            if assistant is None or assistant.content or assistant.calls:  # It has no more than reasoning otherwise.
                messages.append(assistant := _Assistant())
            assistant.content = item.content
        else:
            # Chat templates know the older name of `developer`.
            messages.append(("system" if item.role == "developer" else str(item.role), item.content))
    return [message.message if isinstance(message, _Assistant) else message for message in messages]


class TextSettings(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] = Field(default_factory=lambda: dict(_PLAIN_TEXT))
    verbosity: str | None = None

    @property
    def as_response_format(self) -> dict[str, Any]:
        """The format as chat completions have it, with a schema's fields in an object of their own."""
        if self.format.get("type") != "json_schema":
            return self.format
        return {"type": "json_schema", "json_schema": {k: v for k, v in self.format.items() if k != "type"}}


class ReasoningSettings(BaseModel):
    """How much the model reasons."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: Effort | None = None


class ResponsesRequest(TemplateRequest, SampledRequest):
    """A request for the next message of a conversation, which `previous_response_id` may begin."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "background": (False,),
        "conversation": (),
        "moderation": (),
        "prompt": (),
    }
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)
    SAMPLING: ClassVar[Sequence[str]] = SCORELESS

    include: list[str] = Field(default_factory=list, max_length=_MAX_INCLUDED)
    input: list[Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningSettings | None = None
    previous_response_id: str | None = Field(None, max_length=2048)
    store: bool = True
    stream: bool = False
    text: TextSettings = Field(default_factory=lambda: TextSettings())
    tool_choice: Any = "auto"
    tools: tuple[ToolFunction, ...] = ()
    origins: Origins = Field(default_factory=dict)
    ignored_tools: tuple[str, ...] = ()
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] = "disabled"

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, value: Any) -> Any:
        if isinstance(value, list):
            check_message_count(len(value))
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _read_origins(cls, values: dict[str, Any]) -> Any:
        tools = functions_of(values["tools"]) if isinstance(values.get("tools"), list) else None
        given = {} if tools is None else {"tools": tools.functions}
        own = ({}, ()) if tools is None else (tools.origins, tuple(dict.fromkeys(tools.ignored)))
        return {**values, **given, "origins": own[0], "ignored_tools": own[1]}

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        json_text([[[value]]])  # As deep as an event of the answer has them.
        return read_tools(value)

    @property
    def has_encrypted_reasoning(self) -> bool:
        """Whether items of reasoning have content that the next request may give back alone."""
        return _ENCRYPTED_REASONING in self.include

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in self.include or bool(self.top_logprobs)

    @property
    def template_hints(self) -> Mapping[str, Any]:
        return effort_variables(self.reasoning.effort, "reasoning.effort") if self.reasoning is not None else {}

    def continuing(self, previous: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """The messages: the instructions, the `previous` ones and the new ones."""
        instructions: list[TemplateMessage] = [("system", self.instructions)] if self.instructions else []
        return [*instructions, *previous, *self.conversation]

    def check(self) -> None:
        super().check()
        try:
            self._conversation = messages_of(self.input)
        except ValueError as error:
            raise InvalidRequestError(f"input: {error}", param="input") from None
        self.input = []  # Its messages are kept.
        self._ignored += self.ignored_tools
        if self.text.verbosity not in (None, "medium"):
            self._ignored.append("text.verbosity")
        if set(self.include) - {_LOGPROBS, _ENCRYPTED_REASONING}:
            self._ignored.append("include")
        fields = {
            "text.format": self.text.as_response_format,
            "structured_outputs": self.extra.get("structured_outputs"),
        }
        self._structured_outputs = structured_outputs_of(fields, "text.format", ignored=self._ignored)
        choice = nested_choice(self.tool_choice)
        self.read_tool_use("tool_choice", lambda: read_tool_choice(choice).use(self.tools, self.parallel_tool_calls))
        self.note_keywords()

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = super().sampling()
        if self.has_logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return given if self.max_output_tokens is None else given | {"max_tokens": self.max_output_tokens}
