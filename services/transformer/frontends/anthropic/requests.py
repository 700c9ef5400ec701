"""Requests for messages, and for the number of their tokens.

Of content in blocks, only text is served; several blocks are joined by newlines. Beside Anthropic's fields those of the
sampling table are read. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from millrace.errors import InvalidRequestError
from millrace.sampling import SamplingParameters
from services.transformer.calls import check_bad_words, check_stop
from services.transformer.frontends.openai.requests import OpenAIRequest, text_of
from services.transformer.frontends.openai.sampled_request import SCORELESS


class Turn(BaseModel):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return text_of(value, part="block")


class ConversationRequest(OpenAIRequest):
    """A conversation whose next message is the assistant's; also a request for the number of its tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "none"},),
        "tools": ([],),
    }

    messages: list[Turn] = Field(min_length=1)
    system: str = ""

    @field_validator("system", mode="before")
    @classmethod
    def _read_system(cls, value: Any) -> Any:
        return text_of(value, part="block")

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """(role, content) pairs."""
        turns: list[tuple[str, str]] = [(turn.role, turn.content) for turn in self.messages]
        return [("system", self.system), *turns] if self.system else turns

    def check(self) -> None:
        super().check()
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
