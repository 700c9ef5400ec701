"""How many prompt tokens a step may compute, with or without running streams.

Prompts and streams share each step, so prompts delay the next token of every stream. A step may take as long as the
largest of these:

- the target, so that the gap between two tokens of a stream stays within it. A long prompt needs large steps: each
  chunk reads the keys and values of all tokens before it, whether many or few tokens share that cost;
- `_LEAST_STRETCH` times a step without prompts, so that prompts progress also where that step by itself exceeds the
  target;
- 1 + prompts / streams times a step without prompts: each prompt gets as much time as each stream, so that one stream
  does not delay sixteen prompts;
- as many times a step without prompts as there are prompts, up to `_PATIENCE_S`: small steps are inefficient, and more
  callers wait for a first token than for a next one.

If no stream runs, a step may take `_PATIENCE_S`: new requests wait for its end, and a prompt of ordinary length fits
undivided.

The durations of steps are measured, because no constant suits every model and machine. A step without prompts takes a +
b · streams; a chunk of n prompt tokens adds n · c + (n + `_READ`) · d · position: each token attends to all tokens
before it, whose keys and values the chunk reads once. Both lines follow the latest steps, so a step that takes longer
than estimated makes the next one smaller. Pure; times come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace_predictor.engine.cpu.step_sizes import size_above, size_below

_LEAST_STRETCH = 1.8
_LEAST = 4  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, until there are measurements.
_MOST = 1 << 30  # Tokens, where steps seem to take no time.
_PATIENCE_S = 0.25
_LEAST_ALONE = 256  # Tokens.
_READ = 12  # Tokens whose attention takes as long as reading all keys and values once.
# The weight of a step relative to the next one. Costs of prompt tokens change within a prompt, and differ at its start.
_STREAMS_MEMORY, _COSTS_MEMORY = 0.97, 0.7
_LEAST_COST = 0.1  # Relative to the mean: a line through late positions may be wrong about early ones.


class PrefillPace:
    """Measures steps and limits the next one. `max_gap_s` is the target for the gap between two tokens of a stream."""

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._streams = _Line(_STREAMS_MEMORY)  # Seconds of a step without prompts, by its number of streams.
        self._costs = _Line(_COSTS_MEMORY)  # Seconds that a prompt token adds, by the tokens that its chunk attends to.

    def limit(self, streams: int, prompts: int, position: int = 0) -> int:
        """The number of tokens that `prompts` sequences, the first from `position` on, may compute beside streams."""
        alone_s = self._streams.estimate(streams)
        if not streams:
            return size_below(max(_LEAST_ALONE, self._tokens_in(_PATIENCE_S - alone_s, position)))
        # `alone_s` is 0 until there was a step without prompts: a new engine may be given many of them at once.
        longest_s = max(
            self._max_gap_s,
            alone_s * max(_LEAST_STRETCH, 1 + prompts / streams),
            min(alone_s * prompts, _PATIENCE_S),
        )
        tokens = self._tokens_in(longest_s - alone_s, position)
        return max(size_below(streams + tokens), size_above(streams + _LEAST)) - streams

    def observe(self, streams: int, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Adds the measurement of a step with one token for each of `streams` and chunks of prompts.

        `chunks`: the position of the first token, and the number of tokens.
        """
        tokens = attended = 0.0
        for start, count in chunks:
            tokens += count
            attended += (count + _READ) * (start + count / 2)
        if not tokens:
            self._streams.observe(streams, seconds)
        else:
            added_s = max(0.0, seconds - self._streams.estimate(streams))
            self._costs.observe(attended / tokens, added_s / tokens)

    def _tokens_in(self, seconds: float, position: int) -> int:
        """The number of tokens from `position` on that take so many seconds."""
        if not self._costs.mean:
            return _UNKNOWN
        growth_s = self._costs.slope
        first_s = max(self._costs.estimate(position), _LEAST_COST * self._costs.mean) + growth_s * _READ / 2
        # n tokens take n * first_s + (n * n / 2 + _READ * position) * growth_s.
        seconds = max(0.0, seconds - _READ * position * growth_s)
        return int(min(_MOST, 2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * growth_s * seconds))))


class _Line:
    """y by x, both positive: a line through the latest measurements, by least squares; 0 without measurements.

    It neither descends nor is negative at x = 0, for any noise.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        self._weight = self._weight * self._memory + 1
        self._x = self._x * self._memory + x
        self._y = self._y * self._memory + y
        self._xx = self._xx * self._memory + x * x
        self._xy = self._xy * self._memory + x * y

    @property
    def mean(self) -> float:
        return self._y / self._weight if self._weight else 0.0

    @property
    def slope(self) -> float:
        spread = self._weight * self._xx - self._x**2
        if spread <= 1e-6 * self._xx * self._weight:
            return 0.0
        slope = (self._weight * self._xy - self._x * self._y) / spread
        return min(max(0.0, slope), self._y / self._x)

    def estimate(self, x: float) -> float:
        if not self._weight:
            return 0.0
        return self.mean + self.slope * (x - self._x / self._weight)
