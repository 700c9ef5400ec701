"""What an engine takes and gives; nothing above it may know which engine runs.

`Engine.submit` takes a `GenerationRequest` and returns at once with an `OutputSlot`, from which one
reader takes `Chunk`s until one has a `finish_reason`, or which it cancels. Its `Timeline` tells when what happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from millrace.errors import MillraceError
from millrace.oip.prompt_logprobs import PromptLogprobs
from millrace.sampling import ContextLimits, SamplingParameters
from services.predictor.counts import RequestCounts

_PREEMPTIONS_KEPT = 32


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate.

    Generation continues after `output_ids`, tokens that were produced before: `max_tokens`,
    `min_tokens`, penalties and positions count them. `sampling` is resolved (seed, max_tokens).
    `moved`: its caller was in the middle of it elsewhere, and goes before those that begin.
    `deadline` is on the clock of time.monotonic(), infinity for none; `first_token_timeout_s` begins with the
    submission. While a request that runs `alone` is computed, until its next token, the engine computes nothing else.
    `prompt_logprobs`: of each token of the prompt its log probability, and so many of the likeliest; None is neither.
    """

    id: str
    input_ids: list[int]
    sampling: SamplingParameters
    output_ids: list[int] = field(default_factory=list)
    deadline: float = math.inf
    first_token_timeout_s: float | None = None
    alone: bool = False
    moved: bool = False
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, how many of them needed no computation, and tokens of the output."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Logprobs(NamedTuple):
    """Log probabilities at one output position, in nats, by the model's raw logits."""

    chosen: float
    top: list[tuple[int, float]]  # The likeliest (token id, log probability), best first; as many as were asked for.


@dataclass(frozen=True)
class Chunk:
    """New tokens of a sequence; the last chunk has `finish_reason` ("stop" or "length") and `usage`.

    `logprobs` has one entry a token where the request asks for them, else none. `prompt` is in the first chunk of a
    request that asks for it.
    """

    output_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt: PromptLogprobs | None = None


@dataclass(slots=True)
class Timeline:
    """When what became of a sequence, on the clock of time.monotonic(); None: not, or not yet.

    The engine writes each time once, before the reader can know of what happened then, and the reader only reads.
    `started` is when the first step began that computes some of it; `first_token` the first that is made here;
    `ended` when it had no place in the engine any more. Preempted, it gave its place back to be computed again later:
    all `preemptions` are counted, and of the latest ones the times are kept.
    """

    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0
    preempted: tuple[float, ...] = ()

    def preempt(self, now: float) -> None:
        """Notes that it gave its place back."""
        self.preemptions += 1
        # A new tuple each time: who reads has the old one or the new one.
        self.preempted = (*self.preempted, now)[-_PREEMPTIONS_KEPT:]


class OutputSlot(Protocol):
    """Where one reader takes what an engine makes; tokens merge while the reader is away."""

    @property
    def timeline(self) -> Timeline:
        """When what became of it, as far as that is."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that needed no computation; known once there is a chunk."""

    @property
    def runs_alone(self) -> bool:
        """Whether the engine computes nothing else until the next token; it waits a little until this is `reported`."""

    def reported(self) -> None:
        """The caller has been informed of `runs_alone`."""

    async def readable(self, timeout_s: float) -> bool:
        """Waits until `read` has a chunk, or an error, at once; False where that takes longer than `timeout_s`.

        False at once where `runs_alone` is to be reported.
        """

    async def read(self) -> Chunk:
        """The next chunk, as large as `chunk_tokens` and `chunk_ms` ask; raises the request's MillraceError."""

    def cancel(self) -> None:
        """Ends a request whose output is no longer wanted; may be called at any time, and more than once."""

    def fail(self, error: MillraceError) -> None:
        """Ends the output with an error, after what has been made; the request still has to be cancelled."""


@dataclass(frozen=True)
class EngineLimits(ContextLimits):
    """What a request is held against before it is submitted; only some models score prompts."""

    vocabulary_size: int
    scores_prompts: bool = False


@dataclass
class EngineStatistics(RequestCounts):
    """Counters since the engine started; durations in nanoseconds."""

    step_ns: int = 0
    forward_ns: int = 0
    tokens: int = 0
    tokens_after_cancel: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0


class EngineTotals(NamedTuple):
    """Counted since the engine started: tokens of prompts, those that needed no computation, tokens that were made,
    those generated after the caller had gone, and how often a sequence gave its place back."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    tokens_after_cancel: int = 0
    preempted: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do at a moment, and what it has done.

    `batch` is the sequences that the latest step computed, 0 while there is nothing to do; `blocks_in_use` the share of
    the cache that running sequences hold; `oldest_age_s` how long ago the oldest sequence was submitted, 0 where there
    is none.
    """

    running: int
    waiting: int
    batch: int
    blocks_in_use: float
    oldest_age_s: float
    totals: EngineTotals


class Engine(Protocol):
    """Generates many sequences at once."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def statistics(self) -> EngineStatistics: ...

    @property
    def load(self) -> EngineLoad:
        """What there is to do now; cheap, and for any thread."""

    @property
    def description(self) -> dict[str, str]:
        """Facts that ModelConfig shows as parameters, such as "runner"."""

    def submit(self, request: GenerationRequest) -> OutputSlot:
        """Queues a request; one that is complete already gets an empty last chunk.

        Raises OverloadedError, also where the queue is longer than the request can wait; NotReadyError, also where
        another request runs in isolation; and InvalidRequestError for what can never fit.
        """

    async def died(self) -> None:
        """Waits until the engine cannot continue, then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the engine; what is in flight ends with NotReadyError (where it has died, HopBrokenError)."""


class EngineDeadError(Exception):
    """The engine cannot continue; the process must be restarted."""
