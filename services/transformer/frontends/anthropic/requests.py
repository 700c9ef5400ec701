"""Requests for messages, and for the number of their tokens.

Of content in blocks, text, calls of tools, their results and thinking are served; several blocks of text are joined by
newlines. Beside Anthropic's fields those of the sampling table are read. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from millrace.errors import InvalidRequestError
from millrace.sampling import SamplingParameters
from services.transformer.calls import check_bad_words, check_stop
from services.transformer.frontends.anthropic.tools import messages_of, read_choice, read_declarations
from services.transformer.frontends.openai.requests import OpenAIRequest, text_of
from services.transformer.frontends.openai.sampled_request import SCORELESS
from services.transformer.frontends.openai.tools import TemplateMessage
from services.transformer.text.tools import ToolFunction, ToolUse


class Turn(BaseModel):
    """One message of the conversation; its content as messages of chat templates."""

    role: Literal["user", "assistant"]
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


class ConversationRequest(OpenAIRequest):
    """A conversation whose next message is the assistant's; also a request for the number of its tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
        "thinking": ({"type": "disabled"},),
    }

    messages: list[Turn] = Field(min_length=1)
    system: str = ""
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    tools: tuple[ToolFunction, ...] = ()

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        return read_declarations(value)

    @field_validator("system", mode="before")
    @classmethod
    def _read_system(cls, value: Any) -> Any:
        return text_of(value, part="block")

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
        if self.messages[-1].role != "user":
            raise InvalidRequestError("the last message must be the user's", param="messages")


class MessagesRequest(ConversationRequest):
    """A request for the assistant's next message."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {**ConversationRequest.UNSUPPORTED, "container": ()}
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)

    max_tokens: int
    stream: bool = False
    stop_sequences: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()

    @field_validator("stop_sequences", "bad_words", mode="before")
    @classmethod
    def _read_texts(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def trim(self) -> None:
        SamplingParameters().changed(self.sampling())
        check_stop(self.stop_sequences)
        check_bad_words(self.bad_words)
        super().trim()

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = {name: self.extra[name] for name in SCORELESS if self.extra.get(name) is not None}
        return given | {"max_tokens": self.max_tokens}
