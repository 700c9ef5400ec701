"""The end of a JSON object in text that comes in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class ObjectEnd:
    """Finds the end of one object by its brackets and strings, without a check of what is between them."""

    def __init__(self) -> None:
        self._depth = 0
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
