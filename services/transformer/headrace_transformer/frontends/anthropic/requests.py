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
from headrace.sampling import SamplingParameters
from headrace_transformer.frontends.anthropic.blocks import messages_of, text_of_blocks, unread_fields
from headrace_transformer.frontends.anthropic.tools import read_choice, read_declarations
from headrace_transformer.frontends.openai.requests import OpenAIRequest
from headrace_transformer.frontends.openai.sampled_request import SCORELESS
from headrace_transformer.frontends.openai.structured_outputs import structured_outputs_of
from headrace_transformer.frontends.openai.tools import TemplateMessage
from headrace_transformer.generation.requests import check_bad_words, check_stop
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

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that the model may call, None for none."""
        try:
            choice, is_parallel = read_choice(self.tool_choice)
            return choice.use(self.tools, is_parallel)
        except ValueError as error:
            raise InvalidRequestError(f"tool_choice: {error}", param="tool_choice") from None

    def check(self) -> None:
        super().check()
        _ = self.tool_use
        last = self.messages[-1]
        if last.role == "assistant" and not (len(last.content[-1]) == 2 and last.content[-1][1].strip()):
            raise InvalidRequestError("only a last message of text can be continued", param="messages")
        self._ignored += self.unread


class MessagesRequest(ConversationRequest):
    """A request for the assistant's next message."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {**ConversationRequest.UNSUPPORTED, "container": ()}
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    output_format: dict[str, Any] | None = None  # The older place of `output_config.format`.

    @field_validator("stop_sequences", "bad_words", mode="before")
    @classmethod
    def _read_texts(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def trim(self) -> None:
        SamplingParameters().changed(self.sampling())
        check_stop(self.stop_sequences)
        check_bad_words(self.bad_words)
        super().trim()

    def check(self) -> None:
        super().check()
        forms = {"output_format": self.output_format, "structured_outputs": self.extra.get("structured_outputs")}
        if self.output_config is not None:
            forms["output_config.format"] = self.output_config.format
        names = "output_config.format", "output_format"
        self._structured_outputs = structured_outputs_of(forms, *names, ignored=self._ignored)
        self.note_keywords(self.tool_use)

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = {name: self.extra[name] for name in SCORELESS if self.extra.get(name) is not None}
        form = {"structured_outputs": self._structured_outputs} if self._structured_outputs else {}
        return given | form | {"max_tokens": self.max_tokens}
