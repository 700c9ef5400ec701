"""How many tokens of prompts a step may compute, beside running streams or alone.

Prompts and streams share each step, so a long prompt stretches the gaps between everyone's tokens. A
step may always take `_STRETCH` times as long as one without prompts; so much longer as there are prompts
for each stream, so that one prompt hardly disturbs sixteen streams and one stream does not hold up
sixteen prompts; and as many times as long as there are prompts, but for no more than `_PATIENCE_S`: small
steps are dear, and those who wait for their first token are more than those who wait for the next. Where
no stream runs it may take `_PATIENCE_S`, since what comes in meanwhile waits for its end, and no prompt
of ordinary length is divided.

What steps take is measured, for no constant would suit every model and machine: those of streams or
prompts alone as a + b · tokens, and beside streams what a prompt's token adds, which grows along the
prompt. Pure; seconds come from the caller.
"""

from __future__ import annotations

_STRETCH = 1.4
_LEAST = 4  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, as long as there is nothing to calculate with.
_PATIENCE_S = 0.25
_LEAST_ALONE = 256  # Tokens.
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
        if not streams:
            return max(_LEAST_ALONE, int((_PATIENCE_S - alone) / per_token)) if per_token > 0 else _LEAST_ALONE
        cost = self._cost or per_token
        if cost <= 0 or alone <= 0:
            return _UNKNOWN
        longest = max(alone * max(_STRETCH, 1 + prompts / streams), min(alone * prompts, _PATIENCE_S))
        return max(_LEAST, int((longest - alone) / cost))

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
