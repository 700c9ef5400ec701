"""Requests for responses: a text or items, of which messages with text are served.

Beside OpenAI's fields those of the sampling table are read. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.transformer.calls import check_message_count
from services.transformer.frontends.openai.errors import UnsupportedFieldError
from services.transformer.frontends.openai.requests import text_of
from services.transformer.frontends.openai.sampled_request import SCORELESS, SampledRequest
from services.transformer.frontends.openai.structured_outputs import structured_outputs_of

_PLAIN_TEXT = {"type": "text"}
_PARTS = ("input_text", "output_text", "text")


class Item(BaseModel):
    """One message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return text_of(value, _PARTS)

    @property
    def message(self) -> tuple[str, str]:
        """As (role, content); chat templates know the older name of `developer`."""
        return "system" if self.role == "developer" else self.role, self.content


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


class ResponsesRequest(SampledRequest):
    """A request for the next message of a conversation, which `previous_response_id` may begin."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)
    SAMPLING: ClassVar[Sequence[str]] = SCORELESS

    input: list[Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = Field(None, max_length=2048)
    store: bool = True
    stream: bool = False
    text: TextSettings = Field(default_factory=lambda: TextSettings())

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, value: Any) -> Any:
        if isinstance(value, list):
            check_message_count(len(value))
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    def conversation(self, previous: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """(role, content) pairs: the instructions, the `previous` messages and the new ones."""
        instructions = [("system", self.instructions)] if self.instructions else []
        return [*instructions, *previous, *(item.message for item in self.input)]

    def check(self) -> None:
        super().check()
        if self.text.verbosity not in (None, "medium"):
            raise UnsupportedFieldError("text.verbosity", self.text.verbosity)
        fields = {
            "text.format": self.text.as_response_format,
            "structured_outputs": self.extra.get("structured_outputs"),
        }
        self._structured_outputs = structured_outputs_of(fields, "text.format")

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = super().sampling()
        return given if self.max_output_tokens is None else given | {"max_tokens": self.max_output_tokens}
