"""The messages of an answer of gpt-oss: reasoning, calls and text. Pure; the text may be cut anywhere.

A message is a header, which names its channel and perhaps a recipient, `<|message|>` and a body up to the next mark:
`<|channel|>commentary to=functions.add <|constrain|>json<|message|>{…}<|call|>`. One to a function is a call; one to
another recipient, or of the channel `analysis`, is reasoning; others are text. Messages of one kind are joined by line
ends. An answer that begins without a header continues a text.

Source: OpenAI's description of the harmony response format.
"""

import re
from collections.abc import Callable

from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>", "to=")  # After white space.
_MARKS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS[:2])
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_TO = re.compile(r"\bto=(functions\.)?([^\s<]+)")
_MAX_HEADER = 512


class HarmonyParser:
    """Separates the messages of one answer; `is_open`: it begins in the body of a reasoning, or is in one.

    `call_id` makes the id of a call of its index; None: calls are text. With `keeps_reasoning` that is text too.
    """

    def __init__(self, is_open: bool, call_id: Callable[[int], str] | None, keeps_reasoning: bool) -> None:
        self.is_open = is_open
        self._keeps_reasoning = keeps_reasoning
        self._call_id = call_id
        self._calls = 0
        self._text = ""  # Held back.
        self._kind: type[Part] | None = Reasoning if is_open else None  # Of the body; None in a header.
        self._has_text = False  # The body.
        self._written: set[type[Part]] = set()
        self._is_start = True

    def push(self, text: str, is_last: bool = False) -> list[Part]:
        """The parts that are certain after adding `text`."""
        self._text += text
        parts: list[Part] = []
        while self._header(parts, is_last) if self._kind is None else self._body(parts, is_last):
            pass
        self.is_open = self._kind is Reasoning
        return parts

    def flush(self) -> list[Part]:
        """The rest, at the end; of a header that is cut off nothing."""
        return self.push("", is_last=True)

    def _header(self, parts: list[Part], is_last: bool) -> bool:
        """Reads the next header, if it is whole."""
        text, at = self._text.lstrip(), self._text.find(_MESSAGE)
        begun = next((mark for mark in _BEGINS if text.startswith(mark)), "")
        if begun and 0 <= at <= _MAX_HEADER:
            header, self._text = self._text[:at], self._text[at + len(_MESSAGE) :]
            self._begin(header, parts)
            return True
        is_cut = bool(begun) or any(mark.startswith(text) for mark in _BEGINS)
        if is_last:
            is_layout = begun in _MARKS if begun else is_cut and not self._is_start
        else:
            is_layout = is_cut and len(self._text) <= _MAX_HEADER
        if is_layout:
            return False
        self._kind, self._has_text, self._is_start = Content, False, False
        passed = len(self._text) - len(text) + len(begun)
        self._pass(self._text[:passed], parts)
        self._text = self._text[passed:]
        return True

    def _begin(self, header: str, parts: list[Part]) -> None:
        to, self._has_text, self._is_start = _TO.search(header), False, False
        is_text = self._keeps_reasoning or (to is None and "<|channel|>analysis" not in header)
        self._kind = Content if is_text else Reasoning
        if to is not None and to[1]:
            self._kind = Content
            if self._call_id is not None:
                parts.append(CallStart(self._calls, self._call_id(self._calls), to[2]))
                self._kind, self._calls = CallArguments, self._calls + 1

    def _body(self, parts: list[Part], is_last: bool) -> bool:
        """Passes a body on, up to the mark that ends it."""
        text, found = self._text, _MARK.search(self._text)
        end = found.start() if found else len(text)
        if not (found or is_last):
            held = range(min(len(text), len(_BEGINS[1]) - 1), -1, -1)
            end -= next(n for n in held if any(mark.startswith(text[len(text) - n :]) for mark in _MARKS))
        self._pass(text[:end], parts)
        self._text = text[end:].removeprefix(found[0]) if found and found[0] not in _BEGINS else text[end:]
        if self._kind is CallArguments and not self._has_text and (found or is_last):
            self._pass("{}", parts)
        if found:
            self._kind = None
        return found is not None

    def _pass(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._kind is CallArguments:
            parts.append(CallArguments(self._calls - 1, text))
        else:
            kind = Reasoning if self._kind is Reasoning else Content
            parts.append(kind(text if self._has_text or kind not in self._written else f"\n{text}"))
            self._written.add(kind)
        self._has_text = True
