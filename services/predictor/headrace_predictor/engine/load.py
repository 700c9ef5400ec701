"""What an engine measures of its own work: its load, how long a request would wait, how much a step may compute.

Times come from the caller, in seconds of the monotonic clock. All but `LoadMeter.read` is for one thread.
"""

import math
import threading
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

from headrace.errors import OverloadedError
from headrace_predictor.engine.cpu.step_sizes import size_above, size_below
from headrace_predictor.engine.interface import EngineLoad, EngineStatistics
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Row, Sequence

# Of QueueEstimate.
_ENOUGH = 8  # Ends.
_MARGIN = 1.2  # All work of a request that is late by a little is lost.
_STEPS_MEMORY_S = 1.0

# Of PrefillPace.
_LEAST_STRETCH = 1.8
_LEAST, _LEAST_OF_PASS = 4, 32  # Tokens; fewer would hardly be cheaper.
_UNKNOWN = 32  # Tokens, until there are measurements.
_MOST = 1 << 30  # Tokens, where steps seem to take no time.
_PATIENCE_S = 0.25
_PATIENCE_STEPS = 4  # Where steps take so long that in `_PATIENCE_S` few prompts come in.
_MOST_PROMPTS = 32  # That count: a stream waits no longer for more of them.
_LEAST_ALONE = 256  # Tokens.
_READ = 12  # Tokens whose attention takes as long as reading all keys and values once.
# The weight of a step relative to the next one. Costs of prompt tokens change within a prompt, and differ at its start.
_STREAMS_MEMORY, _COSTS_MEMORY = 0.97, 0.7
_LEAST_COST = 0.1  # Relative to the mean: a line through late positions may be wrong about early ones.


class LoadMeter:
    """The load of an engine, for threads that observe it; `guard` is held by every thread that changes the scheduler.

    The engine's thread reports each step. `read` is thread-safe and blocks the engine and submitters only while it
    copies the two lists of sequences.
    """

    def __init__(self, scheduler: Scheduler, statistics: EngineStatistics, guard: threading.Condition) -> None:
        self._scheduler = scheduler
        self._statistics = statistics
        self._guard = guard
        self._batch = 0

    def begin(self, rows: Rows[Row], now: float) -> None:
        """Records the rows of a step that begins, and which sequences start with it."""
        self._batch = len(rows)
        for row in rows:
            sequence = row.sequence
            if sequence.timeline.started is None:
                sequence.slot.start(now, sequence.cached_tokens)
                self._statistics.prompt_tokens += len(sequence.input_ids)
                self._statistics.cached_tokens += sequence.cached_tokens

    @staticmethod
    def end(rows: Rows[Row], seconds: float) -> None:
        """Divides the duration of a step among its sequences, by the tokens computed for each.

        The parts of all sequences add up to the time that the engine worked; waiting sequences have none of it.
        """
        token_s = seconds / sum(row.count for row in rows)
        for row in rows:
            row.sequence.timeline.engine_s += row.count * token_s

    def idle(self) -> None:
        """Records that there is no work."""
        self._batch = 0

    def read(self) -> EngineLoad:
        with self._guard:
            running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
            prompts = [sequence.remaining for sequence in running + waiting if not sequence.decodes]
        return EngineLoad(
            running=len(running),
            waiting=len(waiting),
            batch=self._batch,
            blocks_in_use=self._scheduler.blocks.in_use,
            oldest_submitted_at=min((sequence.timeline.submitted for sequence in running + waiting), default=0.0),
            waiting_tokens=sum(prompts),
        )


class _Run(NamedTuple):
    requested_tokens: int
    seconds: float
    step_s: float


class QueueEstimate:
    """Estimates how long a request would wait for a slot and run, from the requests that have ended.

    Similar requests end in bursts, so the rate is measured over the last two rounds of all slots and not over the last
    few ends. It is the rate of the current busy period: earlier ones do not predict it. Until enough requests have
    ended, nothing is estimated. A machine that has become slower shows in the duration of its steps before any request
    ends: runs are expected to last longer by as much. `places` is the number of requests that run at once."""

    def __init__(self, places: int) -> None:
        rounds = max(2 * _ENOUGH, 2 * places)
        self._ends: deque[float] = deque(maxlen=rounds)  # Times at which slots became free.
        self._runs: deque[_Run] = deque(maxlen=rounds)
        self._interval_s = 1.0  # The latest estimate of the time between ends.
        self._token_s = 0.0  # Seconds for each requested token; lower if requests end early.
        self._step_s = 0.0  # Of the latest second.
        self._run_step_s = 0.0  # The same as the runs ended.

    def stepped(self, seconds: float) -> None:
        """Records a step without prompts: those of a burst of prompts take longer on any machine."""
        self._step_s += min(1.0, seconds / _STEPS_MEMORY_S if self._step_s else 1.0) * (seconds - self._step_s)

    def ended(self, now: float) -> None:
        """Records that a slot has become free."""
        self._ends.append(now)
        if self._has_data:
            self._interval_s = self._interval(now)

    def succeeded(self, requested_tokens: int, seconds: float) -> None:
        """Records that a request for at most `requested_tokens` tokens ran for `seconds`."""
        self._runs.append(_Run(requested_tokens, seconds, self._step_s))
        self._token_s = sum(run.seconds for run in self._runs) / sum(run.requested_tokens for run in self._runs)
        self._run_step_s = sum(run.step_s for run in self._runs) / len(self._runs)

    def idle(self) -> None:
        """Records that there is no work."""
        self._ends.clear()
        self._runs.clear()
        self._token_s = self._step_s = self._run_step_s = 0.0

    @property
    def retry_after_ms(self) -> int:
        """The estimated time until the next slot is free."""
        return max(1, int(self._interval_s * 1000))

    def too_late(self) -> OverloadedError:
        """The error of a sequence that is expected to miss a deadline."""
        message = "the queue is longer than the request can wait"
        return OverloadedError(message, retry_after_ms=self.retry_after_ms)

    def is_late(self, sequence: Sequence, ahead: int, now: float) -> bool:
        """Whether a sequence behind `ahead` others is expected to miss a deadline."""
        if not ahead or not self._has_data:
            return False
        starts_at = now + _MARGIN * ahead * self._interval(now)
        first_token_deadline = sequence.first_token_deadline
        if first_token_deadline is not None and starts_at > first_token_deadline:
            return True
        return self.is_hopeless(sequence, starts_at)

    def is_hopeless(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that starts now is expected to miss its deadline."""
        slower = max(1.0, self._step_s / self._run_step_s) if self._run_step_s else 1.0
        done_at = now + _MARGIN * slower * self._token_s * sequence.requested_tokens
        return self._has_data and done_at > sequence.deadline

    @property
    def _has_data(self) -> bool:
        return len(self._ends) >= _ENOUGH

    def _interval(self, now: float) -> float:
        return (now - self._ends[0]) / len(self._ends)


class PrefillPace:
    """How many prompt tokens a step may compute, with or without running streams.

    Prompts and streams share each step, so prompts delay the next token of every stream. A step may take as long as the
    largest of these:

    - the target `max_gap_s`, so that the gap between two tokens of a stream stays within it. A long prompt needs large
      steps: each chunk reads the keys and values of all tokens before it, whether many or few tokens share that cost;
    - `_LEAST_STRETCH` times a step without prompts, so that prompts progress also where that step by itself exceeds the
      target;
    - 1 + prompts / streams times a step without prompts: each prompt gets as much time as each stream, so that one
      stream does not delay sixteen prompts;
    - as many times a step without prompts as there are prompts, as long as that adds at most `_PATIENCE_S`, or
      `_PATIENCE_STEPS` such steps: streams lose the time of all prompts in any order, and fewer callers wait if prompts
      are first.

    If no stream runs, a step may take `_PATIENCE_S`: new requests wait for its end, and a prompt of ordinary length
    fits undivided.

    The durations of steps are measured, because no constant suits every model and machine. A step without prompts takes
    a + b · streams; a chunk of n prompt tokens adds n · c + (n + `_READ`) · d · position: each token attends to all
    tokens before it, whose keys and values the chunk reads once. Both lines follow the latest steps, so a step that
    takes longer than estimated makes the next one smaller.

    Without `packed`, each chunk has a forward pass of its own, which reads all weights: small ones cost as much.
    """

    def __init__(self, max_gap_s: float, packed: bool = True) -> None:
        self._max_gap_s = max_gap_s
        self._packed = packed
        self._streams = _Line(_STREAMS_MEMORY)  # Seconds of a step without prompts, by its rows.
        self._costs = _Line(_COSTS_MEMORY)  # Seconds that a prompt token adds, by the tokens that its chunk attends to.

    def limit(self, streams: int, prompts: Rows[tuple[int, int]]) -> int:
        """The number of tokens of prompts that a step may compute beside streams.

        `prompts`, in their order: how many tokens of each are computed, and how many are left.
        """
        alone_s, count = self._streams.estimate(streams), min(len(prompts), _MOST_PROMPTS)
        if not streams:
            return size_below(max(_LEAST_ALONE, self._tokens_in(_PATIENCE_S - alone_s, prompts)))
        # `alone_s` is 0 until there was a step of mostly streams: a new engine may be given many prompts at once.
        longest_s = max(
            self._max_gap_s,
            alone_s * max(_LEAST_STRETCH, 1 + count / streams),
            alone_s + min(alone_s * (count - 1), max(_PATIENCE_S, _PATIENCE_STEPS * alone_s)),
        )
        tokens = self._tokens_in(longest_s - alone_s, prompts)
        if not self._packed:
            return max(size_below(tokens), _LEAST_OF_PASS)
        return max(size_below(streams + tokens), size_above(streams + _LEAST)) - streams

    def observe(self, streams: int, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Adds the measurement of a step with one token for each of `streams` and chunks of prompts.

        `chunks`: the position of the first token, and the number of tokens.
        """
        tokens = attended = 0.0
        for start, count in chunks:
            tokens += count
            attended += (count + _READ) * (start + count / 2)
        is_first = self._packed and tokens <= streams and not self._streams.mean
        if not tokens or is_first:  # A token of a short chunk costs about what a stream does.
            self._streams.observe(streams + tokens, seconds)
        if tokens:
            added_s = max(0.0, seconds - self._streams.estimate(streams))
            self._costs.observe(attended / tokens, added_s / tokens)

    def _tokens_in(self, seconds: float, prompts: Rows[tuple[int, int]]) -> int:
        """The number of tokens of prompts that take so many seconds."""
        if not self._costs.mean:
            return _UNKNOWN
        tokens, growth_s = 0, self._costs.slope
        for position, left in prompts:
            first_s = max(self._costs.estimate(position), _LEAST_COST * self._costs.mean) + growth_s * _READ / 2
            # n tokens take n * first_s + (n * n / 2 + _READ * position) * growth_s.
            seconds = max(0.0, seconds - _READ * position * growth_s)
            fitting = 2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * growth_s * seconds))
            if fitting < left:
                return tokens + int(fitting)
            tokens += left
            seconds -= left * (first_s + left / 2 * growth_s)
        return _MOST


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


class ProgressWatch:
    """Finds a stream that gets no tokens although steps continue.

    Every step must serve the sequences that are due (`Scheduler.due`). If steps pass one by for `timeout_s`, the
    sequence and with it the engine are stuck, which would otherwise raise no error.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._passed_by_since: dict[Sequence, float] = {}

    def observe(self, due: Iterable[Sequence], served: Collection[Sequence], now: float) -> Sequence | None:
        """Records which due sequences a step served; returns the sequence that is stuck, if any."""
        before = self._passed_by_since
        passed_by = {sequence: before.get(sequence, now) for sequence in due if sequence not in served}
        self._passed_by_since = passed_by
        return next((sequence for sequence, since in passed_by.items() if now - since > self._timeout_s), None)
