"""The items of a response's output: reasoning, messages and calls of tools, whole and as events.

An item has the parts of an answer that belong together; the next one begins where `begins_segment` has it.
Source: OpenAI's API reference.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from pydantic_core import from_json

from headrace_transformer.frontends.http import event_json, named_event
from headrace_transformer.frontends.responses.tools import INPUT, Origin, Origins
from headrace_transformer.text.answer_parts import CallStart, Content, Part, Reasoning, begins_segment

_REASONING = "mr1."  # Before the content of reasoning for the server.

Write = Callable[[str, Mapping[str, Any]], bytes]  # Writes an event of a kind with its fields.


@dataclass(frozen=True)
class ItemFields:
    """What the items of an answer have: `origins` of called functions, and reasoning that can be given back."""

    origins: Origins = field(default_factory=dict)
    has_encrypted_reasoning: bool = False


class OutputItem:
    """One item; `index` is its place in the output. It is complete with all its texts added.

    The text is the one part of its content, which has a `PART_TYPE`; a call has none, and the text in a field.
    """

    PREFIX: ClassVar[str]
    EVENT: ClassVar[str]  # The kind of the events of its text, without `.delta` and `.done`.
    PART_TYPE: ClassVar[str] = ""
    FIELDS: ClassVar[Mapping[str, Any]] = {}  # Of an item with content.
    BESIDE_DELTA: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, response_id: str, index: int) -> None:
        number = f"_{index}" if index else ""
        self._id = f"{self.PREFIX}_{response_id.removeprefix('resp_')}{number}"
        self._index = index
        self._texts: list[str] = []
        self._place = {"item_id": self._id, "output_index": index} | ({"content_index": 0} if self.PART_TYPE else {})
        delta = named_event({"type": f"{self.EVENT}.delta", **self._place, **self.BESIDE_DELTA})
        self._delta_before = delta.removesuffix(b"}\n\n") + b',"sequence_number":'

    def add(self, part: Part, scores: Sequence[dict[str, Any]] = ()) -> str:
        """Adds the text of a part, and returns what of it is an event's; a message takes its tokens' scores too."""
        text = "" if isinstance(part, CallStart) else part.text
        self._texts.append(text)
        return text

    def whole(self, status: str) -> dict[str, Any]:
        """The item with the texts so far."""
        return self._item(status, "".join(self._texts))

    def begin(self, write: Write) -> bytes:
        """The events before the first text."""
        added = {"output_index": self._index, "item": self._item("in_progress", None)}
        return write("response.output_item.added", added) + self._part_event(write, "added", "")

    def delta(self, text: str, number: int) -> bytes:
        """The event of new text, with its sequence number."""
        return self._delta_before + b"%d" % number + b',"delta":' + event_json(text) + b"}\n\n"

    def end(self, write: Write, status: str) -> bytes:
        """The events after the last text."""
        text = "".join(self._texts)
        done = {"output_index": self._index, "item": self._item(status, text)}
        written = write(f"{self.EVENT}.done", self._place | self._done(text)) + self._part_event(write, "done", text)
        return written + write("response.output_item.done", done)

    def _part_event(self, write: Write, kind: str, text: str) -> bytes:
        if not self.PART_TYPE:
            return b""
        return write(f"response.content_part.{kind}", self._place | {"part": self._part(text)})

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        """The item with a text, None before its first one."""
        content = [] if text is None else [self._part(text)]
        return {"id": self._id, "status": status, **self.FIELDS, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.PART_TYPE, "text": text}

    def _done(self, text: str) -> dict[str, Any]:
        """The fields of the event that has the whole text."""
        return {"text": text}


class MessageItem(OutputItem):
    """Text of the assistant."""

    PREFIX, EVENT, PART_TYPE = "msg", "response.output_text", "output_text"
    FIELDS: ClassVar = {"type": "message", "role": "assistant"}
    BESIDE_DELTA: ClassVar = {"logprobs": []}

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self.scores: list[dict[str, Any]] = []  # The log probabilities of tokens.
        self._new_scores: list[dict[str, Any]] = []

    def add(self, part: Part, scores: Sequence[dict[str, Any]] = ()) -> str:
        self._new_scores = list(scores)
        self.scores += self._new_scores
        return super().add(part)

    def delta(self, text: str, number: int) -> bytes:
        if not self._new_scores:
            return super().delta(text, number)
        fields = self._place | {"sequence_number": number, "delta": text, "logprobs": self._new_scores}
        return named_event({"type": f"{self.EVENT}.delta", **fields})

    def _part(self, text: str) -> dict[str, Any]:
        return super()._part(text) | {"annotations": [], "logprobs": self.scores if text else []}

    def _done(self, text: str) -> dict[str, Any]:
        return {"logprobs": self.scores, "text": text}


class ReasoningItem(OutputItem):
    """Reasoning, as text and not as a summary."""

    PREFIX, EVENT, PART_TYPE = "rs", "response.reasoning_text", "reasoning_text"
    FIELDS: ClassVar = {"type": "reasoning", "summary": []}

    def __init__(self, response_id: str, index: int, has_encrypted: bool = False) -> None:
        super().__init__(response_id, index)
        self._has_encrypted = has_encrypted

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        encrypted = {"encrypted_content": _encrypted(text)} if self._has_encrypted and text is not None else {}
        return super()._item(status, text) | encrypted


class CallItem(OutputItem):
    """A call of a function."""

    PREFIX = "fc"
    EVENT = "response.function_call_arguments"

    def __init__(self, response_id: str, index: int, start: CallStart, origin: Origin) -> None:
        super().__init__(response_id, index)
        self._call = {"call_id": start.id, **origin.place}
        self._name = origin.name

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        return {"id": self._id, "type": "function_call", "status": status, **self._call, "arguments": text or ""}

    def _done(self, text: str) -> dict[str, Any]:
        return {"name": self._name, "arguments": text}


class CustomCallItem(CallItem):
    """A call of a custom tool, whose input is the one text in its arguments; its event comes when that is whole."""

    PREFIX = "ctc"
    EVENT = "response.custom_tool_call_input"

    def add(self, part: Part, scores: Sequence[dict[str, Any]] = ()) -> str:
        super().add(part)
        return ""

    def end(self, write: Write, status: str) -> bytes:
        given = _input_of("".join(self._texts))
        return write(f"{self.EVENT}.delta", self._place | {"delta": given}) + super().end(write, status)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        call = {"id": self._id, "type": "custom_tool_call", "status": status}
        return call | self._call | {"input": _input_of(text or "")}

    def _done(self, text: str) -> dict[str, Any]:
        return {"input": _input_of(text)}


def reasoning_of(encrypted: str) -> str:
    """The text of reasoning that a client gives back; "" for another server's."""
    try:
        return base64.b64decode(encrypted.removeprefix(_REASONING)).decode() if encrypted.startswith(_REASONING) else ""
    except (binascii.Error, ValueError):
        return ""


def _encrypted(text: str) -> str:
    """Reasoning as a client gives it back; it is no secret, for the item has the text too."""
    return _REASONING + base64.b64encode(text.encode("utf-8", "replace")).decode()


def _input_of(arguments: str) -> str:
    """The input of a custom tool, as much of it as is there."""
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    return str(values.get(INPUT, "")) if isinstance(values, dict) else ""


def item_of(first: Part, response_id: str, index: int, fields: ItemFields) -> OutputItem:
    """The item that a part begins, without its text."""
    if isinstance(first, CallStart):
        origin = fields.origins.get(first.name, Origin(first.name))
        return (CustomCallItem if origin.is_custom else CallItem)(response_id, index, first, origin)
    if isinstance(first, Reasoning):
        return ReasoningItem(response_id, index, fields.has_encrypted_reasoning)
    return MessageItem(response_id, index)


class Output:
    """The items of one response and their events, each of which has the next number."""

    def __init__(self, response_id: str, fields: ItemFields) -> None:
        self._id = response_id
        self._fields = fields
        self._numbers = count()
        self._items: list[OutputItem] = []
        self._last: Part | None = None

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return named_event({"type": kind, "sequence_number": next(self._numbers), **fields})

    def take(self, part: Part, scores: Sequence[dict[str, Any]] = ()) -> bytes:
        """The events of the answer's next part; the scores are those of a text's tokens."""
        written = b""
        if begins_segment(part, self._last):
            if self._items:
                written = self._items[-1].end(self.event, "completed")
            self._items.append(item_of(part, self._id, len(self._items), self._fields))
            written += self._items[-1].begin(self.event)
        self._last = part
        if text := self._items[-1].add(part, scores):
            written += self._items[-1].delta(text, next(self._numbers))
        return written

    def add_scores(self, scores: Sequence[dict[str, Any]]) -> None:
        """Adds the scores of the tokens that end an answer without a text of their own, if it ends with a text."""
        if self._items and isinstance(self._items[-1], MessageItem):
            self._items[-1].scores += scores

    def end(self, status: str) -> bytes:
        """The events of the last item's end; an answer without parts is an empty message."""
        written = b"" if self._items else self.take(Content(""))
        return written + self._items[-1].end(self.event, status)

    def whole(self, status: str) -> list[dict[str, Any]]:
        """All items; the last one has the response's own status."""
        *others, last = self._items or [MessageItem(self._id, 0)]
        return [*(item.whole("completed") for item in others), last.whole(status)]


def output_of(response_id: str, parts: Iterable[Part], status: str, fields: ItemFields) -> list[dict[str, Any]]:
    """The items that the parts of a whole answer make."""
    output = Output(response_id, fields)
    for part in parts:
        output.take(part)
    return output.whole(status)
