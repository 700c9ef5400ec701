"""How many prompt tokens a step may compute, with or without running streams.

Prompts and streams share each step, so a long prompt delays the next token of every stream. A step may take `_STRETCH`
times as long as one without prompts, or 1 + prompts / streams times if that is more, so that one prompt hardly disturbs
sixteen streams and one stream does not delay sixteen prompts. Up to `_PATIENCE_S` it may take as many times as long as
there are prompts, because small steps are inefficient and more callers then wait for a first token than for a next one.
If no stream runs, a step may take `_PATIENCE_S`: new requests wait for its end, and a prompt of ordinary length fits
undivided.

The durations of steps are measured, because no constant suits every model and machine: steps of only streams or only
prompts as a + b · tokens; in mixed steps the additional cost of a prompt token, which grows along the prompt. Pure;
times come from the caller.
"""

from __future__ import annotations

_STRETCH = 1.4
_LEAST = 4  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, until there are measurements.
_PATIENCE_S = 0.25
_LEAST_ALONE = 256  # Tokens.
_LINE_MEMORY = 0.97  # The weight of a step relative to the next one.
_COST_MEMORY = 0.7


class PrefillPace:
    """Measures steps and limits the next one."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._products = 0.0
        self._cost: float | None = None  # Seconds that one more prompt token takes.

    def limit(self, streams: int, prompts: int) -> int:
        """The number of tokens that `prompts` sequences may compute in a step with `streams` others."""
        alone, per_token = self._alone(streams)
        if not streams:
            return max(_LEAST_ALONE, int((_PATIENCE_S - alone) / per_token)) if per_token > 0 else _LEAST_ALONE
        cost = self._cost or per_token
        if cost <= 0 or alone <= 0:
            return _UNKNOWN
        longest = max(alone * max(_STRETCH, 1 + prompts / streams), min(alone * prompts, _PATIENCE_S))
        return max(_LEAST, int((longest - alone) / cost))

    def observe(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """Adds the measurement of a step with one token for each of `streams` and `prompt_tokens` of prompts."""
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
        """Estimated seconds of a step of `tokens` tokens, and of one token; 0 if the measurements do not suffice."""
        spread = self._weight * self._tokens_squared - self._tokens**2
        if spread <= 1e-6 * self._tokens_squared * self._weight:
            return 0.0, 0.0
        per_token = (self._weight * self._products - self._tokens * self._seconds) / spread
        return (self._seconds + per_token * (tokens * self._weight - self._tokens)) / self._weight, per_token
