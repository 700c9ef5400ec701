"""How many tokens of prompts a step may compute beside running streams.

Prompts and streams share each step, so a long prompt stretches the gaps between everyone's tokens. The
pace is held where a step with prompts takes at most `_STRETCH` times what one without takes, by
measurement: hardware and models differ too much for a number. Pure; seconds come from the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.predictor.engine.sequence import Row

_STRETCH = 1.7
_LEAST = 16  # Tokens; fewer would hardly be cheaper.
_SMOOTHING = 0.2


class PrefillPace:
    """`tokens` is the current pace; `observe` adapts it."""

    def __init__(self, step_tokens: int) -> None:
        self.tokens = step_tokens
        self._most = step_tokens
        self._decode_s: float | None = None

    def observe(self, rows: Iterable[Row], seconds: float) -> None:
        """Learns from a step how long it took."""
        prefilled = sum(row.count for row in rows if row.count > 1)
        if not prefilled:
            before = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before + _SMOOTHING * (seconds - before)
        elif self._decode_s is not None and any(row.count == 1 for row in rows):
            if seconds > _STRETCH * self._decode_s:
                self.tokens = max(_LEAST, int(min(self.tokens, prefilled) * 0.8))
            elif prefilled >= self.tokens:
                self.tokens = min(self._most, self.tokens + _LEAST)
