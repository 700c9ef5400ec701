"""The items of a response's output: reasoning, messages and calls of tools, whole and as events.

An item has the parts of an answer that belong together; the next one begins where `begins_segment` has it.
Source: OpenAI's API reference.
"""

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import from_json

from headrace_transformer.frontends.http import event_json, named_event
from headrace_transformer.frontends.responses.tools import INPUT, Origin, Origins
from headrace_transformer.text.answer_parts import CallStart, Part, Reasoning, begins_segment

_REASONING = "mr1."  # Before the content of reasoning for the server.
Scores = list[dict[str, Any]]  # The log probabilities of tokens.

Write = Callable[[str, Mapping[str, Any]], bytes]  # Writes an event of a kind with its fields.


@dataclass(frozen=True)
class ItemFields:
    """What the items of an answer have: `origins` of called functions, and reasoning that can be given back."""

    origins: Origins = field(default_factory=dict)
    has_encrypted_reasoning: bool = False


class OutputItem(ABC):
    """One item; `index` is its place in the output. It is complete with all its texts added."""

    PREFIX: ClassVar[str]
    EVENT: ClassVar[str]  # The kind of the events of its text, without `.delta` and `.done`.

    def __init__(self, response_id: str, index: int) -> None:
        number = f"_{index}" if index else ""
        self._id = f"{self.PREFIX}_{response_id.removeprefix('resp_')}{number}"
        self._index = index
        self._texts: list[str] = []
        delta = named_event({"type": f"{self.EVENT}.delta", **self._place()})
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
        return write(
            "response.output_item.added", {"output_index": self._index, "item": self._item("in_progress", None)}
        )

    def delta(self, text: str, number: int) -> bytes:
        """The event of new text, with its sequence number."""
        return self._delta_before + b"%d" % number + b',"delta":' + event_json(text) + b"}\n\n"

    def end(self, write: Write, status: str) -> bytes:
        """The events after the last text."""
        text = "".join(self._texts)
        written = write(f"{self.EVENT}.done", self._place() | self._done(text))
        return written + self._after(write, text, status)

    def _after(self, write: Write, text: str, status: str) -> bytes:
        return write("response.output_item.done", {"output_index": self._index, "item": self._item(status, text)})

    def _place(self) -> dict[str, Any]:
        """Where the text belongs."""
        return {"item_id": self._id, "output_index": self._index}

    @abstractmethod
    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        """The item with a text, None before its first one."""

    @abstractmethod
    def _done(self, text: str) -> dict[str, Any]:
        """The fields of the event that has the whole text."""


class _ContentItem(OutputItem):
    """An item whose text is one part of its content; `FIELDS` are beside it."""

    FIELDS: ClassVar[Mapping[str, Any]]

    def begin(self, write: Write) -> bytes:
        return super().begin(write) + write("response.content_part.added", self._content_place(""))

    def _after(self, write: Write, text: str, status: str) -> bytes:
        return write("response.content_part.done", self._content_place(text)) + super()._after(write, text, status)

    def _place(self) -> dict[str, Any]:
        return super()._place() | {"content_index": 0}

    def _content_place(self, text: str) -> dict[str, Any]:
        return _ContentItem._place(self) | {"part": self._part(text)}

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {"id": self._id, "status": status, **self.FIELDS, "content": content}

    def _done(self, text: str) -> dict[str, Any]:
        return {"text": text}

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]: ...


class MessageItem(_ContentItem):
    """Text of the assistant."""

    PREFIX = "msg"
    EVENT = "response.output_text"
    FIELDS: ClassVar = {"type": "message", "role": "assistant"}

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self._scores: Scores = []
        self._new_scores: Scores = []

    def add(self, part: Part, scores: Sequence[dict[str, Any]] = ()) -> str:
        self._new_scores = list(scores)
        self._scores += self._new_scores
        return super().add(part)

    def delta(self, text: str, number: int) -> bytes:
        if not self._new_scores:
            return super().delta(text, number)
        fields = _ContentItem._place(self) | {"sequence_number": number, "delta": text, "logprobs": self._new_scores}
        return named_event({"type": f"{self.EVENT}.delta", **fields})

    def _place(self) -> dict[str, Any]:
        return super()._place() | {"logprobs": []}

    def _done(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": self._scores}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._scores if text else []}


class ReasoningItem(_ContentItem):
    """Reasoning, as text and not as a summary."""

    PREFIX = "rs"
    EVENT = "response.reasoning_text"
    FIELDS: ClassVar = {"type": "reasoning", "summary": []}

    def __init__(self, response_id: str, index: int, has_encrypted: bool = False) -> None:
        super().__init__(response_id, index)
        self._has_encrypted = has_encrypted

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        encrypted = {"encrypted_content": _encrypted(text)} if self._has_encrypted and text is not None else {}
        return super()._item(status, text) | encrypted

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


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
        return write(f"{self.EVENT}.delta", self._place() | {"delta": given}) + super().end(write, status)

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


def output_of(response_id: str, parts: Iterable[Part], status: str, fields: ItemFields) -> list[dict[str, Any]]:
    """The whole output; its last item has the response's own status. An answer without parts is an empty message."""
    items: list[OutputItem] = []
    last: Part | None = None
    for part in parts:
        if begins_segment(part, last):
            items.append(item_of(part, response_id, len(items), fields))
        items[-1].add(part)
        last = part
    return whole_output(items or [MessageItem(response_id, 0)], status)


def whole_output(items: list[OutputItem], status: str) -> list[dict[str, Any]]:
    """The items as a response has them."""
    *others, last = items
    return [*(item.whole("completed") for item in others), last.whole(status)]
