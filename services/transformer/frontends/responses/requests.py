"""Requests for responses: a text or items, of which messages with text, reasoning and functions are served.

Beside OpenAI's fields those of the sampling table are read. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from millrace.errors import InvalidRequestError
from services.transformer.calls import check_message_count
from services.transformer.frontends.openai.errors import UnsupportedFieldError
from services.transformer.frontends.openai.sampled_request import SCORELESS, SampledRequest
from services.transformer.frontends.openai.structured_outputs import structured_outputs_of
from services.transformer.frontends.openai.tools import TemplateMessage, json_text, read_tool_choice, read_tools
from services.transformer.frontends.responses.input_items import Item, messages_of
from services.transformer.frontends.responses.tools import nested_choice, nested_tool
from services.transformer.text.tools import ToolFunction, ToolUse

_PLAIN_TEXT = {"type": "text"}


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
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)
    SAMPLING: ClassVar[Sequence[str]] = SCORELESS

    input: list[Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = Field(None, max_length=2048)
    store: bool = True
    stream: bool = False
    text: TextSettings = Field(default_factory=lambda: TextSettings())
    tool_choice: Any = "auto"
    tools: tuple[ToolFunction, ...] = ()
    _messages: list[TemplateMessage] = PrivateAttr(default_factory=list)

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, value: Any) -> Any:
        if isinstance(value, list):
            check_message_count(len(value))
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        json_text([[[value]]])  # As deep as an event of the answer has them.
        return read_tools(list(map(nested_tool, value)) if isinstance(value, list) else value)

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that the model may call, None for none."""
        try:
            return read_tool_choice(nested_choice(self.tool_choice)).use(self.tools, self.parallel_tool_calls)
        except ValueError as error:
            raise InvalidRequestError(f"tool_choice: {error}", param="tool_choice") from None

    def conversation(self, previous: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """The messages: the instructions, the `previous` ones and the new ones."""
        instructions: list[TemplateMessage] = [("system", self.instructions)] if self.instructions else []
        return [*instructions, *previous, *self._messages]

    def trim(self) -> None:
        super().trim()
        self.input = []  # Its messages are kept.

    def check(self) -> None:
        super().check()
        try:
            self._messages = messages_of(self.input)
        except ValueError as error:
            raise InvalidRequestError(f"input: {error}", param="input") from None
        if self.text.verbosity not in (None, "medium"):
            raise UnsupportedFieldError("text.verbosity", self.text.verbosity)
        fields = {
            "text.format": self.text.as_response_format,
            "structured_outputs": self.extra.get("structured_outputs"),
        }
        self._structured_outputs = structured_outputs_of(fields, "text.format", ignored=self._ignored)
        self.note_keywords(self.tool_use)

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = super().sampling()
        return given if self.max_output_tokens is None else given | {"max_tokens": self.max_output_tokens}
