"""Calls of functions in the text of an answer. Pure; the text may be cut anywhere.

A call begins as soon as its name and the beginning of its arguments are certain; the arguments then pass as the model
writes them, which, as in OpenAI's API, need not be valid JSON. What only looks like a call stays text, to the last
space. The parts depend on the text alone, and not on where it is cut. Formats:

- hermes (Qwen, Hermes): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several one after the other
- llama (Llama 3): `{"name": …, "parameters": {…}}`, which is the whole answer or follows `<|python_tag|>`; only
  functions of the request, because an answer may be any other JSON
- mistral: `[TOOL_CALLS]` before a list of objects as in hermes, or before each `name{…}` (`name[ARGS]{…}`)

In each, one mark may have several objects: in a list, with `,` or `;` between them, or one after the other. The members
of an object have any order, others are left out, and of equal ones the first counts. Without arguments, or with null or
an empty list, the arguments are `{}`.

Source: the chat templates of these models, and their documentation.
"""

import re
from collections.abc import Callable, Container
from typing import ClassVar

from headrace_transformer.text.answer_parts import (
    MAX_LAYOUT,
    CallArguments,
    CallStart,
    Content,
    Part,
    held_length,
    layout_length,
)
from headrace_transformer.text.json_object import ObjectEnd, members_of, skipped

_MAX_HEAD = 64 * 1024  # Characters of an object that are held back until its name is known.
_NAME = r"[\w.-]{1,128}"
_S = r"\s{0,64}"
_HEAD = re.compile(
    rf'{_S}\{{{_S}(?:"(?:type|id)"{_S}:{_S}"[\w.-]{{0,128}}"{_S},{_S}){{0,2}}"name"{_S}:{_S}"({_NAME})"{_S},{_S}'
    rf'"(?:arguments|parameters)"{_S}:{_S}(?=\{{)'
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_KEYS = ("name", "type", "id", "function", "arguments", "parameters")


class ToolCallParser:
    """Separates the calls of one answer from the text beside them.

    `names` are the functions of the request, `call_id` makes the id of a call of its index. Each state is a method that
    takes what it can of the text held back, and returns whether another one can go on.
    """

    MARK: ClassVar[str]
    END: ClassVar[str] = "\0"

    def __init__(self, names: Container[str], call_id: Callable[[int], str]) -> None:
        self._names = names
        self._call_id = call_id
        self._text = ""  # Held back.
        self._parts: list[Part] = []
        self._calls = 0
        self._follows_call = False
        self._is_last = False
        self._head_length = 0  # Of the mark or separator at the beginning of the text, before an object.
        self._is_list = False
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
        """Passes text on up to the next mark, and to the white space before it."""
        at = self._text.find(self.MARK)
        if at >= 0:
            start = at - layout_length(self._text[:at])
            self._pass(self._text[:start])
            self._text = self._text[start:]
            self._head_length = at - start + len(self.MARK)
            self._state = self._after_mark
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

    def _after_mark(self) -> bool:
        """Decides between an object and a list of them."""
        start = skipped(self._text, self._head_length)
        if start == len(self._text):
            return self._is_last and self._is_text()
        self._is_list = self._text[start] == "["
        self._expect_object(start + 1 if self._is_list else self._head_length)
        return True

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
        start = skipped(self._text, self._head_length)
        end = self._end.find(self._text, self._scanned)
        self._scanned = len(self._text)
        is_object = self._text.startswith("{", start) or (start == len(self._text) and not self._is_last)
        if not is_object or self._is_other() or (end if end >= 0 else len(self._text)) - start > _MAX_HEAD:
            return self._is_text()
        if end >= 0:
            return self._whole(start, end)
        return self._is_last and self._is_text()

    def _whole(self, start: int, end: int) -> bool:
        """Reads an object whose members have another order or another type."""
        call = _call_in(self._text, start)
        if call is None or not self._accepts(call[0]):
            return self._is_text()
        self._start(call[0])
        self._parts.append(CallArguments(self._calls - 1, call[1]))
        self._text = self._text[end:]
        self._state = self._after_object
        return True

    def _accepts(self, name: str) -> bool:
        return True

    def _is_other(self) -> bool:
        """Whether an object is certainly no call, which need not be held back then."""
        return False

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
        """Leaves out the further members of a call and its end; without an end it has ended before."""
        text = self._text.lstrip()
        if not text or (text[0] == "," and not text[1:].strip()):
            if not self._is_last:
                return False
        elif text[0] == "}" or (text[0] == "," and text[1:].lstrip()[0] == '"'):
            end = ObjectEnd(depth=1).find(text)
            if end < 0 and len(text) <= _MAX_HEAD:
                if self._is_last:
                    self._text = ""
                return False
            self._text = text[max(end, 0) :]
        self._state = self._after_object
        return True

    def _after_object(self) -> bool:
        """Decides whether another object follows, or the end of the list or of the mark."""
        text = self._text.lstrip()
        layout = len(self._text) - len(text)
        if layout > MAX_LAYOUT:
            self._state = self._in_content
        elif self.END.startswith(text):
            if self._is_last:  # An answer that ended at its maximum length, within the end of a call.
                self._text = ""
            return False
        elif text.startswith(self.END):
            self._text, self._state = text[len(self.END) :], self._in_content
        elif self._is_list and text.startswith("]"):
            self._text, self._is_list = text[1:], False
        elif text.startswith((",", ";", "{")):
            self._expect_object(layout + (text[0] != "{"))
        else:
            self._state = self._in_content
        return True


def _call_in(text: str, at: int) -> tuple[str, str] | None:
    """The name and the arguments of the object that begins at an index, which may be in `function`."""
    try:
        members = members_of(text, at)
        if "name" not in members and (function := members.get("function")) and isinstance(function[0], dict):
            members = members_of(text, function[1])
    except (ValueError, IndexError, RecursionError):
        return None
    name = members["name"][0] if "name" in members else None
    value, start, end = members.get("arguments") or members.get("parameters") or (None, at, at)
    if not isinstance(name, str) or not name:
        return None
    if isinstance(value, str):
        return name, value if value.strip() else "{}"
    return name, "{}" if value is None or value == [] else text[start:end]


class HermesParser(ToolCallParser):
    MARK, END = "<tool_call>", "</tool_call>"


class LlamaParser(ToolCallParser):
    MARK = "<|python_tag|>"

    def __init__(self, names: Container[str], call_id: Callable[[int], str]) -> None:
        super().__init__(names, call_id)
        self._state = self._at_start

    def _at_start(self) -> bool:
        """Decides whether the answer begins with an object, or with a list of them."""
        text = self._text.lstrip()
        if not text and not self._is_last:
            return False
        self._state = self._after_mark if text.startswith(("{", "[")) else self._in_content
        return True

    def _accepts(self, name: str) -> bool:
        return name in self._names

    def _is_other(self) -> bool:
        found = _FIRST_KEY.match(self._text, self._head_length)
        is_bare = not self._calls and self.MARK not in self._text[: self._head_length]
        return is_bare and found is not None and found[1] not in _KEYS


class MistralParser(ToolCallParser):
    MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(rf"{_S}({_NAME})(?:\[CALL_ID\][\w-]{{1,64}})?(?:\[ARGS\])?{_S}(?=\{{)")
    _BEGINS_NAMED = re.compile(rf"{_S}(?:{_NAME})?(?:\[C?A?L?L?_?I?D?|\[CALL_ID\][\w-]{{0,64}})?(?:\[A?R?G?S?\]?)?{_S}")

    def _after_mark(self) -> bool:
        """Decides between objects and a name with its arguments."""
        found = self._NAMED.match(self._text, self._head_length)
        if found is not None:
            self._is_list = False
            self._start(found[1])
            self._text = self._text[found.end() :]
            self._begin_arguments(self._after_object)
            return True
        start = skipped(self._text, self._head_length)
        if not self.MARK.startswith(self._text[start : start + len(self.MARK)]):
            if self._text[start] in "[{":
                return super()._after_mark()
        elif start + len(self.MARK) > len(self._text):  # White space, and perhaps the beginning of a list or a mark.
            return self._is_last and self._is_text()
        if self._is_last or not self._BEGINS_NAMED.fullmatch(self._text, self._head_length):
            return self._is_text()
        return False


PARSERS: dict[str, type[ToolCallParser]] = {"hermes": HermesParser, "llama": LlamaParser, "mistral": MistralParser}
