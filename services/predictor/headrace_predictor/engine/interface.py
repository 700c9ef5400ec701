"""What an engine takes, gives and counts. It imports no library of models: the predictor's own process has none."""

import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.oip.prompt_scores import PromptLogprobs
from headrace.sampling import CHECKED, ContextLimits, SamplingParameters
from headrace_protos.steps_pb2 import Submission

Outcome = Literal["succeeded", "failed", "cancelled"]

_WEIGHT = 0.1  # The weight of the newest request in the mean duration.


_PREEMPTIONS_KEPT = 32


def sampling_of(submission: Submission) -> SamplingParameters:
    """The sampling parameters of a submission that the predictor has completed: with defaults, seed and max_tokens."""
    return SamplingParameters.model_validate_json(submission.sampling or b"{}", context=CHECKED)


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, how many of them came from the cache, and tokens of the output."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Logprobs(NamedTuple):
    """Log probabilities at one output position, in nats, from the model's raw logits."""

    chosen: float
    top: list[tuple[int, float]]  # The likeliest (token id, log probability), best first; as many as requested.


@dataclass(frozen=True)
class Chunk:
    """New tokens of a sequence; the last chunk has `finish_reason` ("stop" or "length") and `usage`.

    `logprobs` has one entry for each token if the request asks for them, else none. `prompt` is in the first chunk if
    the request asks for it.
    """

    output_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt: PromptLogprobs | None = None


@dataclass(slots=True)
class Timeline:
    """The times of a sequence's events, on the clock of time.monotonic(); None (0 for `submitted`): not yet, or never.

    The engine writes each time once, before the reader can see the event; the reader only reads. `started` is the start
    of the first step that computes a part of the sequence; `first_token` the time of the first token generated here;
    `ended` when the sequence released its slot for good. A preempted sequence releases its slot and is computed again
    later: `preemptions` counts all of them, and the times of the latest are kept. `engine_s` grows: the sequence's part
    of the durations of its steps, see LoadMeter.
    """

    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0
    preempted: tuple[float, ...] = ()
    engine_s: float = 0.0

    def preempt(self, now: float) -> None:
        self.preemptions += 1
        # A new tuple each time: a concurrent reader has the old one or the new one.
        self.preempted = (*self.preempted, now)[-_PREEMPTIONS_KEPT:]


@dataclass(frozen=True)
class EngineLimits(ContextLimits):
    """The limits that requests are validated against; only some models score prompts."""

    vocabulary_size: int
    scores_prompts: bool = False


@dataclass
class RequestCounts:
    """Counters that only the model itself can keep, since it was created.

    They have one owner; times are those of time.monotonic().
    """

    steps: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    mean_compute_s: float = 0.1

    @property
    def ended(self) -> int:
        """Requests that have ended, with any outcome; without those that were refused at once."""
        return self.succeeded + self.failed + self.cancelled

    @property
    def retry_after_ms(self) -> int:
        """The estimated duration of one request."""
        return max(1, int(self.mean_compute_s * 1000))

    def add(self, outcome: Outcome, submitted_at: float, started_at: float, ended_at: float) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.queue_ns += int((started_at - submitted_at) * 1e9)
        self.compute_ns += int((ended_at - started_at) * 1e9)
        if outcome == "succeeded":
            self.mean_compute_s += _WEIGHT * (ended_at - started_at - self.mean_compute_s)


@dataclass
class EngineStatistics(RequestCounts):
    """Counters since the engine started; durations in nanoseconds.

    `tokens_after_cancel` were generated after the caller had gone. Prompt lookup's are `proposed_tokens` and, of these,
    `accepted_tokens`.
    """

    step_ns: int = 0
    forward_ns: int = 0
    tokens: int = 0
    tokens_after_cancel: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """The engine's current load.

    `batch` is the number of sequences in the latest step, 0 when idle; `blocks_in_use` the share of the cache that
    running sequences hold; `oldest_submitted_at` the time of time.monotonic() when the oldest sequence was submitted, 0
    if there is none; `waiting_tokens` the prompt tokens that are still to be computed.
    """

    running: int = 0
    waiting: int = 0
    batch: int = 0
    blocks_in_use: float = 0.0
    oldest_submitted_at: float = 0.0
    waiting_tokens: int = 0

    @property
    def oldest_age_s(self) -> float:
        """The time since the oldest sequence was submitted; 0 if there is none."""
        return max(0.0, time.monotonic() - self.oldest_submitted_at) if self.oldest_submitted_at else 0.0


class EngineDeadError(Exception):
    """The engine cannot continue; its process must be restarted."""


class EngineProcessError(EngineDeadError):
    """The engine's own process has ended; another one can take its place."""
