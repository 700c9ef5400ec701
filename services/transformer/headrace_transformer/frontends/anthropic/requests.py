"""Requests for messages, and for the number of their tokens.

Of content in blocks, text, documents of text, calls of tools, their results and thinking are served; several texts are
joined by newlines. Beside Anthropic's fields those of the sampling table are read. Fields of blocks and of tools that
are not read, such as `cache_control`, are named as ignored. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.anthropic.blocks import (
    messages_of,
    read_choice,
    read_declarations,
    text_of_blocks,
    unread_fields,
)
from headrace_transformer.frontends.openai.requests import SCORELESS, OpenAIRequest, SampledRequest
from headrace_transformer.frontends.openai.structured_outputs import structured_outputs_of
from headrace_transformer.frontends.openai.tools import TemplateMessage
from headrace_transformer.text.tools import ToolFunction, ToolUse


class Turn(BaseModel):
    """One message of the conversation; its content as messages of chat templates."""

    role: Literal["user", "assistant", "system"]
    content: list[TemplateMessage]

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "user")
        if isinstance(value, str):
            return [(role, value)]
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of blocks")
        return messages_of(role, value)


class Thinking(BaseModel):
    """How much the model thinks; with `adaptive` as it does by itself."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None


class ConversationRequest(OpenAIRequest):
    """A conversation whose next message is the assistant's; also a request for the number of its tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "mcp_servers": ([],),
    }

    messages: list[Turn] = Field(min_length=1)
    system: str = ""
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    tools: tuple[ToolFunction, ...] = ()
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    unread: tuple[str, ...] = ()  # Of blocks and tools.

    @model_validator(mode="before")
    @classmethod
    def _note_unread(cls, values: Any) -> Any:
        return {**values, "unread": unread_fields(values)}

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        return read_declarations(value)

    @field_validator("system", mode="before")
    @classmethod
    def _read_system(cls, value: Any) -> Any:
        return text_of_blocks(value)

    @property
    def template_hints(self) -> Mapping[str, Any]:
        variables = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}, "adaptive": {}}
        return {} if self.thinking is None else {"thinking": variables[self.thinking.type]}

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template: a last message of the assistant is continued."""
        is_begun = self.messages[-1].role == "assistant"
        continued = {"continue_final_message": True, "add_generation_prompt": False} if is_begun else {}
        return {**self.template_hints.get("thinking", {}), **continued}

    @property
    def conversation(self) -> list[TemplateMessage]:
        """The messages as chat templates take them."""
        messages = [message for turn in self.messages for message in turn.content]
        return [("system", self.system), *messages] if self.system else messages

    def _tools(self) -> ToolUse | None:
        choice, is_parallel = read_choice(self.tool_choice)
        return choice.use(self.tools, is_parallel)

    def check(self) -> None:
        super().check()
        self.read_tool_use("tool_choice", self._tools)
        last = self.messages[-1]
        if last.role == "assistant" and not (len(last.content[-1]) == 2 and last.content[-1][1].strip()):
            raise InvalidRequestError("only a last message of text can be continued", param="messages")
        self._ignored += self.unread


class MessagesRequest(ConversationRequest, SampledRequest):
    """A request for the assistant's next message."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {**ConversationRequest.UNSUPPORTED, "container": ()}
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)
    SAMPLING: ClassVar[Sequence[str]] = SCORELESS

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop: tuple[str, ...] = Field((), validation_alias="stop_sequences")
    output_format: dict[str, Any] | None = None  # The older place of `output_config.format`.

    def check(self) -> None:
        super().check()
        forms = {"output_format": self.output_format, "structured_outputs": self.extra.get("structured_outputs")}
        if self.output_config is not None:
            forms["output_config.format"] = self.output_config.format
        names = "output_config.format", "output_format"
        self._structured_outputs = structured_outputs_of(forms, *names, ignored=self._ignored)
        self.note_keywords()

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | {"max_tokens": self.max_tokens}
