"""Token ids to text, as they come: never half a character, never any part of a stop string.

Pure: one instance a request, no I/O. Text that could still become a stop string is held back until
it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class StopFinder:
    """Passes text on up to the first of the stop strings."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What can be passed on after `text`."""
        self._held += text
        at = min((i for s in self._stop if (i := self._held.find(s)) >= 0), default=-1)
        if at >= 0:
            self.found = True
            passed, self._held = self._held[:at], ""
            return passed
        keep = max((self._overlap(s) for s in self._stop), default=0)
        end = len(self._held) - keep
        passed, self._held = self._held[:end], self._held[end:]
        return passed

    def flush(self) -> str:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Detokenizer:
    """Decodes one sequence's output.

    `prompt_ids` are what the output follows, so that a tokenizer that drops the space before the
    first word of a text does not drop it here; empty where the output begins a text of its own.
    Stop strings are looked for in what comes after the first `min_tokens` ids.
    """

    _CONTEXT = 6  # Ids of the prompt that decide how the output's first id is written.

    def __init__(self, backend: Any, prompt_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> None:
        self._backend = backend
        self._early = min_tokens
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._decoded = len(self._decode())
        self._stream = DecodeStream(ids=self._ids, skip_special_tokens=True)
        self._finder = StopFinder(stop)

    @property
    def stopped(self) -> bool:
        """A stop string was found; what follows it is not wanted."""
        return self._finder.found

    def push(self, token_id: int) -> str:
        """The text that can be passed on after this id."""
        self._ids.append(token_id)
        piece = self._stream.step(self._backend, token_id) or ""
        self._decoded += len(piece)
        if self._early > 0:
            self._early -= 1
            return piece
        return self._finder.push(piece)

    def flush(self) -> str:
        """The rest of the text, when no more ids follow: an unfinished character is written as U+FFFD."""
        rest = self._finder.push(self._decode()[self._decoded :])
        return rest if self.stopped else rest + self._finder.flush()

    def _decode(self) -> str:
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)
        return text
