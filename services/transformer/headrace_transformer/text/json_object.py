"""JSON objects in text: the end of one that comes in pieces, and where the values of a whole one are."""

import json
import re
from typing import Any

_STRUCTURE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)
_IN_STRING = re.compile(r'["\\]')


class ObjectEnd:
    """Finds the end of one object by its brackets and strings, without a check of what is between them.

    `depth` is that of the text's beginning.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str, at: int = 0) -> int:
        """The index behind the object in the next piece of text, from `at` on; -1 if it continues after the piece."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                break
            at = found.end()
            if found[0] == "\\":
                self._is_escaped = True
            elif found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return -1


def members_of(text: str, at: int) -> dict[str, tuple[Any, int, int]]:
    """The members of an object, each with the indices of its value; raises ValueError, IndexError, RecursionError."""
    found: dict[str, tuple[Any, int, int]] = {}
    at = skipped(text, at + 1)
    while text[at] != "}":
        if found and text[at] != ",":
            raise ValueError
        key, at = _DECODER.raw_decode(text, skipped(text, at + 1) if found else at)
        at = skipped(text, at)
        if not isinstance(key, str) or text[at] != ":":
            raise ValueError
        start = skipped(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        found.setdefault(key, (value, start, end))
        at = skipped(text, end)
    return found


def skipped(text: str, at: int) -> int:
    """The index behind white space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
