"""The text of one answer in parts: its reasoning, then its calls of functions and the text beside them.

`push` takes the text of one token at a time, so that the tokens of the reasoning are counted. Pure.
"""

from __future__ import annotations

from headrace_transformer.text.answer_parts import Answer, CallArguments, CallStart, Content, Part, merged
from headrace_transformer.text.reasoning import ReasoningParser
from headrace_transformer.text.tool_calls import ToolCallParser


class AnswerParser:
    """One instance for each answer; without a parser for something, that is text. `max_calls` leaves out others."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._parts: list[Part] = []
        # Tokens of the reasoning, its marks included.
        self._reasoning_tokens: int | None = None if reasoning is None else 0

    def push(self, text: str) -> None:
        """Takes the text of the next token."""
        was_open = self._reasoning is not None and self._reasoning.is_open
        self.push_rest(text)
        if self._reasoning is not None and (was_open or self._reasoning.is_open):
            self._reasoning_tokens = (self._reasoning_tokens or 0) + 1

    def push_rest(self, text: str) -> None:
        """Takes further text of tokens that were counted already."""
        self._take([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> None:
        """Takes the rest, at the end."""
        if self._reasoning is not None:
            self._take(self._reasoning.flush())
        if self._tools is not None:
            self._keep(self._tools.flush())

    def taken(self) -> Answer:
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return Answer(merged(parts), self._reasoning_tokens)

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, Content) and self._tools is not None:
                self._keep(self._tools.push(part.text))
            else:
                self._keep([part])

    def _keep(self, parts: list[Part]) -> None:
        limit = self._max_calls
        for part in parts:
            is_beyond = limit is not None and isinstance(part, CallStart | CallArguments) and part.number >= limit
            if not is_beyond and not (isinstance(part, Content) and not part.text):
                self._parts.append(part)
