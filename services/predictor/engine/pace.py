"""How many tokens of prompts a step may compute beside running streams.

Prompts and streams share each step, so a long prompt stretches the gaps between everyone's tokens. A
step may take so much longer than one without prompts as there are prompts for each stream, so that
one prompt hardly disturbs sixteen streams and one stream does not hold up sixteen prompts; and always
`_STRETCH` times as long. How long steps take is measured, as a + b · tokens, for no constant would
suit every model and machine. Pure; seconds come from the caller.
"""

from __future__ import annotations

_STRETCH = 1.6
_LEAST = 16  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, as long as there is nothing to calculate with.
_MEMORY = 0.97  # The weight of a step against the one after it.
_OUTLIER = 4.0  # Times the expected duration; what is beyond is the machine's doing.


class PrefillPace:
    """A line through the recent steps' tokens and durations."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._products = 0.0

    def limit(self, streams: int, prompts: int) -> int:
        """Tokens that `prompts` sequences may compute in a step in which `streams` others get their next."""
        fixed, per_token = self._line()
        if per_token <= 0:
            return _UNKNOWN
        alone = max(0.0, fixed) + per_token * streams
        stretch = max(_STRETCH, 1 + prompts / streams)
        return max(_LEAST, int((stretch - 1) * alone / per_token))

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a step."""
        fixed, per_token = self._line()
        if per_token > 0:
            seconds = min(seconds, _OUTLIER * max(0.0, fixed + per_token * tokens))
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + tokens
        self._seconds = self._seconds * _MEMORY + seconds
        self._tokens_squared = self._tokens_squared * _MEMORY + tokens * tokens
        self._products = self._products * _MEMORY + tokens * seconds

    def _line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and of each token; the latter 0 where the steps do not tell."""
        spread = self._weight * self._tokens_squared - self._tokens**2
        if spread <= 1e-6 * self._tokens_squared * self._weight:
            return 0.0, 0.0
        per_token = (self._weight * self._products - self._tokens * self._seconds) / spread
        return (self._seconds - per_token * self._tokens) / self._weight, per_token
