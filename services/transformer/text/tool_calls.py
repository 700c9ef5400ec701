"""Calls of functions in the text of an answer. Pure; the text may be cut anywhere.

A call begins as soon as its name and the beginning of its arguments are certain; the arguments then pass as the model
writes them, which, as in OpenAI's API, need not be valid JSON. What only looks like a call stays text. The parts depend
on the text alone, and not on where it is cut. Formats:

- hermes (Qwen, Hermes): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several one after the other
- llama (Llama 3): `{"name": …, "parameters": {…}}`, which is the whole answer or follows `<|python_tag|>`, several with
  `;` between them; only functions of the request, because an answer may be any other JSON
- mistral: `[TOOL_CALLS]` before a list of objects as in hermes, or before each `name{…}` (`name[ARGS]{…}`)

Source: the chat templates of these models, and their documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any, ClassVar

import orjson

from services.transformer.text.answer_parts import CallArguments, CallStart, Content, Part
from services.transformer.text.json_object import ObjectEnd
from services.transformer.text.marks import held_length, layout_length

_MAX_HEAD = 64 * 1024  # Characters of an object that are held back until its name is known.
_NAME = r"[\w.-]{1,128}"
_S = r"\s{0,64}"
_HEAD = re.compile(
    rf'{_S}\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"({_NAME})"{_S},{_S}'
    rf'"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)


class ToolCallParser:
    """Separates the calls of one answer from the text beside them.

    `names` are the functions of the request, `call_id` makes the id of a call of its index. Each state is a method that
    takes what it can of the text held back, and returns whether another one can go on.
    """

    MARK: ClassVar[str]

    def __init__(self, names: Container[str], call_id: Callable[[int], str]) -> None:
        self._names = names
        self._call_id = call_id
        self._text = ""  # Held back.
        self._parts: list[Part] = []
        self._calls = 0
        self._follows_call = False
        self._is_last = False
        self._head_length = 0  # Of the mark or separator at the beginning of the text, before an object.
        self._end = ObjectEnd()
        self._scanned = 0
        self._state: Callable[[], bool] = self._in_content

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after adding `text`."""
        self._text += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> list[Part]:
        """The rest, at the end."""
        self._is_last = True
        return self.push("")

    def _in_content(self) -> bool:
        """Passes text on up to the next mark."""
        at = self._text.find(self.MARK)
        if at >= 0:
            self._pass(self._text[: at - layout_length(self._text[:at])])
            self._text = self._text[at:]
            self._expect_object(len(self.MARK))
            return True
        if self._is_last:
            if not (self._follows_call and not self._text.strip()):
                self._pass(self._text)
            self._text = ""
            return False
        passed = len(self._text) - held_length(self._text, self.MARK)
        self._pass(self._text[:passed])
        self._text = self._text[passed:]
        return False

    def _pass(self, text: str) -> None:
        if text:
            self._follows_call = False
            self._parts.append(Content(text))

    def _expect_object(self, head_length: int) -> None:
        self._head_length = self._scanned = head_length
        self._end = ObjectEnd()
        self._state = self._in_head

    def _in_head(self) -> bool:
        """Waits until an object is certainly a call."""
        found = _HEAD.match(self._text, self._head_length)
        if found is not None:
            if not self._accepts(found[1]):
                return self._is_text()
            self._start(found[1])
            self._text = self._text[found.end() :]
            self._begin_arguments(self._after_arguments)
            return True
        start = len(self._text) - len(self._text[self._head_length :].lstrip())
        end = self._end.find(self._text, self._scanned)
        self._scanned = len(self._text)
        is_object = self._text.startswith("{", start) or (start == len(self._text) and not self._is_last)
        if not is_object or (end if end >= 0 else len(self._text)) - start > _MAX_HEAD:
            return self._is_text()
        if end >= 0:
            return self._whole(end)
        return self._is_last and self._is_text()

    def _whole(self, end: int) -> bool:
        """Reads an object whose members have another order or another type."""
        try:
            value: Any = orjson.loads(self._text[self._head_length : end])
        except orjson.JSONDecodeError:
            return self._is_text()
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not (isinstance(name, str) and name and isinstance(arguments, (dict, str)) and self._accepts(name)):
            return self._is_text()
        self._start(name)
        text = arguments or "{}" if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        self._parts.append(CallArguments(self._calls - 1, text))
        self._text = self._text[end:]
        self._state = self._after_object
        return True

    def _accepts(self, name: str) -> bool:
        return True

    def _is_text(self) -> bool:
        """Passes on what looked like a call."""
        self._pass(self._text[: self._head_length])
        self._text = self._text[self._head_length :]
        self._state = self._in_content
        return True

    def _start(self, name: str) -> None:
        self._parts.append(CallStart(self._calls, self._call_id(self._calls), name))
        self._calls += 1
        self._follows_call = True

    def _begin_arguments(self, then: Callable[[], bool]) -> None:
        self._end = ObjectEnd()
        self._after = then
        self._state = self._in_arguments

    def _in_arguments(self) -> bool:
        end = self._end.find(self._text)
        passed = self._text if end < 0 else self._text[:end]
        self._text = self._text[len(passed) :]
        if passed:
            self._parts.append(CallArguments(self._calls - 1, passed))
        if end >= 0:
            self._state = self._after
        return end >= 0

    def _after_arguments(self) -> bool:
        return self._skip("}", self._after_object)

    def _after_object(self) -> bool:
        raise NotImplementedError

    def _skip(self, literal: str, then: Callable[[], bool]) -> bool:
        """Leaves out white space and a literal; without it, the call has ended."""
        text = self._text = self._text.lstrip()
        if text.startswith(literal):
            self._text, self._state = text[len(literal) :], then
        elif self._is_last or not literal.startswith(text):
            self._state = self._in_content
        else:
            return False
        return True


class HermesParser(ToolCallParser):
    MARK = "<tool_call>"

    def _after_object(self) -> bool:
        return self._skip("</tool_call>", self._in_content)


class LlamaParser(ToolCallParser):
    MARK = "<|python_tag|>"

    def __init__(self, names: Container[str], call_id: Callable[[int], str]) -> None:
        super().__init__(names, call_id)
        self._state = self._at_start

    def _at_start(self) -> bool:
        """Decides whether the answer begins with an object."""
        text = self._text.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith("{"):
            self._expect_object(0)
        else:
            self._state = self._in_content
        return True

    def _accepts(self, name: str) -> bool:
        return name in self._names

    def _after_object(self) -> bool:
        text = self._text.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith(";"):
            self._text = text
            self._expect_object(1)
        else:
            self._state = self._in_content
        return True


class MistralParser(ToolCallParser):
    MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(rf"{_S}({_NAME})(?:\[CALL_ID\][\w-]{{1,64}})?(?:\[ARGS\])?{_S}(?=\{{)")
    _BEGINS_NAMED = re.compile(rf"{_S}(?:{_NAME})?(?:\[C?A?L?L?_?I?D?|\[CALL_ID\][\w-]{{0,64}})?(?:\[A?R?G?S?\]?)?{_S}")

    def _expect_object(self, head_length: int) -> None:
        super()._expect_object(head_length)
        if self._text.startswith(self.MARK):
            self._state = self._after_mark

    def _after_mark(self) -> bool:
        """Decides between a list of objects and a name with its arguments."""
        start = self._head_length
        found = self._NAMED.match(self._text, start)
        if found is not None:
            self._start(found[1])
            self._text = self._text[found.end() :]
            self._begin_arguments(self._after_named)
            return True
        body = self._text[start:].lstrip()
        if body.startswith("["):
            super()._expect_object(len(self._text) - len(body) + 1)
            return True
        if self._is_last or not self._BEGINS_NAMED.fullmatch(self._text, start):
            return self._is_text()
        return False

    def _after_named(self) -> bool:
        self._state = self._in_content
        return True

    def _after_object(self) -> bool:
        text = self._text.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith(","):
            self._text = text
            super()._expect_object(1)
            return True
        return self._skip("]", self._in_content)


PARSERS: dict[str, type[ToolCallParser]] = {"hermes": HermesParser, "llama": LlamaParser, "mistral": MistralParser}
