"""How many tokens of prompts a step may compute beside running streams.

Prompts and streams share each step, so a long prompt stretches the gaps between everyone's tokens. A
step may take so much longer than one without prompts as there are prompts for each stream, so that
one prompt hardly disturbs sixteen streams and one stream does not hold up sixteen prompts; and always
`_STRETCH` times as long. What steps take is measured, for no constant would suit every model and
machine: those of streams or prompts alone as a + b · tokens, and beside streams what a prompt's token
adds, which grows along the prompt. Pure; seconds come from the caller.
"""

from __future__ import annotations

_STRETCH = 1.4
_LEAST = 4  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, as long as there is nothing to calculate with.
_LINE_MEMORY = 0.97  # The weight of a step against the one after it.
_COST_MEMORY = 0.7


class PrefillPace:
    """Learns from steps, and says how large the next may be."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._products = 0.0
        self._cost: float | None = None  # Seconds that a prompt's token adds.

    def limit(self, streams: int, prompts: int) -> int:
        """Tokens that `prompts` sequences may compute in a step in which `streams` others get their next."""
        alone, per_token = self._alone(streams)
        cost = self._cost or per_token
        if cost <= 0 or alone <= 0:
            return _UNKNOWN
        stretch = max(_STRETCH, 1 + prompts / streams)
        return max(_LEAST, int((stretch - 1) * alone / cost))

    def observe(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """Learns from a step that gave so many streams their next token and computed so many of prompts."""
        if streams and prompt_tokens:
            alone, per_token = self._alone(streams)
            if per_token > 0:
                cost = max(0.1 * per_token, (seconds - alone) / prompt_tokens)
                before = cost if self._cost is None else self._cost
                self._cost = cost + _COST_MEMORY * (before - cost)
            return
        tokens = streams + prompt_tokens
        self._weight = self._weight * _LINE_MEMORY + 1
        self._tokens = self._tokens * _LINE_MEMORY + tokens
        self._seconds = self._seconds * _LINE_MEMORY + seconds
        self._tokens_squared = self._tokens_squared * _LINE_MEMORY + tokens * tokens
        self._products = self._products * _LINE_MEMORY + tokens * seconds

    def _alone(self, tokens: int) -> tuple[float, float]:
        """Seconds of a step of so many tokens, and of each token; 0 where the steps do not tell."""
        spread = self._weight * self._tokens_squared - self._tokens**2
        if spread <= 1e-6 * self._tokens_squared * self._weight:
            return 0.0, 0.0
        per_token = (self._weight * self._products - self._tokens * self._seconds) / spread
        return (self._seconds + per_token * (tokens * self._weight - self._tokens)) / self._weight, per_token
