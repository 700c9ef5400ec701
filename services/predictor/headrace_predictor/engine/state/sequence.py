"""A request as the engine sees it while it is in flight.

There is no prefill phase and no decode phase: a sequence has ids, and `computed` of them have their keys and values in
its blocks. A step computes some of the rest; if it computes the last, it samples.
"""

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headrace.errors import DeadlineError
from headrace.models.generation_config import GenerationRules
from headrace.oip.prompt_scores import PromptLogprobs
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import Usage, sampling_of
from headrace_predictor.engine.state.blocks import block_name, first_name
from headrace_predictor.engine.state.constraint import Constraint, Restrictions, restrictions_of
from headrace_predictor.engine.state.slot import MergingSlot, SequenceOutput
from headrace_protos.steps_pb2 import Submission

_NO_SCORES = range(0)


class SamplingRow(NamedTuple):
    """The sampler's input for a row of logits: its parameters, the ids for penalties, and the model's own end tokens.

    Ids may be arrays: lists are converted at each step if a row has penalties. `takes_likeliest` may be the parameters'
    own; False costs time only. `restrictions` are those of the parameters, `rules` those of the model, None where there
    are none. `start_ids` are what an encoder-decoder model's output follows in place of its prompt.
    """

    sampling: SamplingParameters
    input_ids: Ids[int] | NDArray[Any]
    output_ids: Ids[int] | NDArray[Any]
    end_ids: frozenset[int]
    takes_likeliest: bool = False
    restrictions: Restrictions | None = None
    rules: GenerationRules | None = None
    start_ids: Ids[int] = ()


class Sequence:
    """The ids so far, the blocks with their keys and values, and the output slot. Owned by the engine's thread.

    `start_ids` are between prompt and output: an encoder-decoder model's decoder start token.
    """

    def __init__(
        self, submission: Submission, slot: SequenceOutput, end_ids: frozenset[int], start_ids: Ids[int] = ()
    ) -> None:
        self.id = submission.request_id
        self.client = submission.client
        self.weight = submission.weight if submission.HasField("weight") else 1.0
        self.moved = submission.moved
        self.sampling = sampling = sampling_of(submission)
        self.input_ids = list(submission.prompt_ids)
        self.output_ids = list(submission.output_ids)
        self.given = len(self.output_ids)  # Tokens that were generated before.
        self.prompt_logprobs = submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None
        self.deadline = submission.deadline if submission.HasField("deadline") else math.inf
        self.slot = slot
        self.ids = [*self.input_ids, *start_ids, *self.output_ids]
        self.row = SamplingRow(
            sampling,
            self.input_ids,
            self.output_ids,
            end_ids,
            sampling.takes_likeliest,
            restrictions_of(sampling),
            start_ids=start_ids,
        )
        # An encoder reads its whole prompt at once.
        self.indivisible = len(self.input_ids) + len(start_ids) if start_ids else 1
        self.blocks: list[int] = []
        self.computed = 0
        self.newest = 1  # The number of its last ids that came at once: more than one where a grammar forces tokens.
        self.cached_tokens = 0
        self.borders: frozenset[int] = frozenset()  # Where its recurrent states are kept for others.
        self.announced: list[bytes] = []
        self.number = 0  # Its position in the order of arrival.
        self.stage = 0  # Of its first keys, see Scaling in in_flight.py.
        self.state: Any = None  # A model runner's own state of it; discarded with its blocks.
        self.constraint: Constraint | None = None  # Set before it is queued.
        self.adapter_number = submission.adapter
        self.adapter: Any = None  # See engine/adapters.py; set before it is queued.
        self.proposals: Any = None  # See engine/lookup.py.
        self.alone = submission.alone  # Until its next token.
        self.alone_is_announced = False
        self.due_at = 0.0  # When its pace allows the next token.
        self.was_held = False  # Whether its pace has delayed a token.
        self.timeline = slot.timeline
        self.timeline.submitted = time.monotonic()
        self.to_score = 0 if self.prompt_logprobs is None else len(self.input_ids) - 1
        self.scored = 0  # Scored positions of the prompt; a preemption does not reset it.
        self._paced_after = submission.paced_after
        self.end_ids = sampling.end_ids(end_ids)
        has_limit = submission.HasField("first_token_timeout_s")
        self._first_token_timeout_s = submission.first_token_timeout_s if has_limit else None
        self._deadline = self.deadline  # The next of its deadlines.
        if (limit := self.first_token_deadline) is not None:
            self._deadline = min(self._deadline, limit)
        self._scores: list[PromptLogprobs] = []
        self._block_names: list[bytes] = []

    @property
    def longest(self) -> int:
        """The maximum number of tokens whose keys and values it may need."""
        produced = len(self.output_ids)
        return len(self.ids) - produced + max(self.sampling.max_tokens or 0, produced + 1)

    @property
    def requested_tokens(self) -> int:
        """The maximum number of new tokens that the request asks for."""
        return (self.sampling.max_tokens or 0) - self.given

    @property
    def remaining(self) -> int:
        """The number of ids still to be computed."""
        return len(self.ids) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether a next step computes nothing but its newest ids."""
        return self.remaining <= self.newest

    @property
    def proven(self) -> bool:
        """Whether it has a token, which proves that its blocks contain numbers."""
        return len(self.output_ids) > self.given

    @property
    def usage(self) -> Usage:
        return Usage(len(self.input_ids), self.cached_tokens, len(self.output_ids))

    @property
    def complete(self) -> str | None:
        """The finish reason, if the earlier output is already complete."""
        if self.constraint is not None and self.constraint.is_complete:
            return "stop"
        if not self.output_ids:
            return None
        return self.sampling.finish_reason(self.output_ids[-1], len(self.output_ids) - 1, self.end_ids)

    @property
    def first_token_deadline(self) -> float | None:
        """When its first new token is due, until it has one."""
        timeout_s = self._first_token_timeout_s
        return None if timeout_s is None or self.proven else self.timeline.submitted + timeout_s

    def overdue(self, now: float) -> DeadlineError | None:
        """The error of a deadline that has passed."""
        if now < self._deadline:
            return None
        if now >= self.deadline:
            return DeadlineError("the deadline passed during generation")
        limit = self.first_token_deadline
        if limit is not None and now >= limit:
            return DeadlineError(f"no token within {(self._first_token_timeout_s or 0) * 1000:.0f} ms")
        return None

    def block_names(self, count: int, block_tokens: int) -> list[bytes]:
        """The names of its first `count` blocks, all of which are full."""
        names = self._block_names
        for index in range(len(names), count):
            salt = self.sampling.cache_salt
            before = names[-1] if names else first_name(self.client, salt, self.adapter_number, self.stage)
            names.append(block_name(before, self.ids[index * block_tokens : (index + 1) * block_tokens]))
        return names[:count]

    def enter(self, stage: int) -> None:
        """Sets the stage of its keys, before any is computed."""
        self.stage = stage
        self._block_names = []

    @property
    def reusable(self) -> int:
        """The number of ids at the beginning that need no computation if their keys and values are cached."""
        # The last id is always computed: sampling needs its logits.
        return len(self.ids) - 1 if self.scored == self.to_score else self.scored

    def limited(self, count: int, scores: int) -> int:
        """How many of the next `count` ids can be computed if at most `scores` positions are scored."""
        first = max(self.computed, self.scored)
        return count if first + scores >= self.to_score else min(count, first + scores - self.computed)

    def add_scores(self, scores: PromptLogprobs) -> None:
        self._scores.append(scores)
        self.scored += len(scores.chosen)

    def take_prompt(self) -> PromptLogprobs | None:
        """The prompt's scores for the first chunk."""
        if (top := self.prompt_logprobs) is None:
            return None
        parts, self._scores = self._scores, []
        return None if self.proven else PromptLogprobs.joined(parts, top)

    def preempt(self) -> None:
        """Records a preemption: its blocks have been freed and it will be computed again."""
        self.timeline.preempt(time.monotonic())

    def append(self, token_id: int) -> str | None:
        """Appends the next token; returns the finish reason if the sequence ends with it."""
        reason = self.sampling.finish_reason(token_id, len(self.output_ids), self.end_ids)
        if self.constraint is not None and reason != "stop":
            self.constraint.take(token_id)
            reason = "stop" if self.constraint.is_complete else reason
        self.alone = False
        self.newest = 1
        self._deadline = self.deadline
        self.ids.append(token_id)
        self.output_ids.append(token_id)
        if (pace := self.sampling.pace) and len(self.output_ids) >= self._paced_after:
            self.due_at = time.monotonic() + 1 / pace
        return reason

    def forced(self, vocabulary: int) -> int | None:
        """The next token, if the grammar forces it; `vocabulary` is the number of logits.

        None where the sampler has a say: for log probabilities, at a pace, with restrictions and at an end token.
        """
        sampling = self.sampling
        if self.constraint is None or sampling.logprobs or sampling.pace or self.row.restrictions or self.row.rules:
            return None
        token_id = self.constraint.forced()
        return None if token_id is None or token_id >= vocabulary or token_id in self.end_ids else token_id

    def append_forced(self, token_id: int) -> str | None:
        """Appends a token that needs no forward pass of its own; returns the finish reason."""
        newest = self.newest
        reason = self.append(token_id)
        self.newest = newest + 1
        return reason


@dataclass(slots=True, eq=False)
class Row:
    """The part of a sequence that one step computes: `count` ids from `start` on. It is not changed.

    `proposed` are the last of them, if any: they follow the sequence's last id, and may be its next ones. `samples`: it
    includes the last id, so that the next token can be sampled, and one after each proposed id.
    """

    sequence: Sequence
    start: int
    count: int
    proposed: Ids[int] = ()
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.start + self.count - len(self.proposed) == len(self.sequence.ids)

    @classmethod
    def of_coming(cls, sequence: Sequence) -> "Row":
        """The row of the id that the step under way chooses."""
        row = cls(sequence, len(sequence.ids), 1)
        row.samples = True
        return row

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.ids[self.start : self.start + self.count], *self.proposed]

    def parts(self) -> "Iterator[tuple[Row, SamplingRow]]":
        """The part for each token that is sampled, with the sampler's input; a row with proposals has one other id."""
        if not self.proposed:
            yield self, self.sequence.row
            return
        for number in range(self.count):
            part, sampling = Row(self.sequence, self.start + number, 1), self.sequence.row
            part.samples = True
            if number and not sampling.takes_likeliest:
                sampling = sampling._replace(output_ids=[*self.sequence.output_ids, *self.proposed[:number]])
            yield part, sampling

    @property
    def scores(self) -> range:
        """The positions of the prompt whose logits have to be scored and are not scored yet."""
        sequence = self.sequence
        if sequence.scored == sequence.to_score:
            return _NO_SCORES
        first = max(self.start, sequence.scored)
        return range(first, max(first, min(self.start + self.count, sequence.to_score)))


def precedence(sequence: Sequence) -> tuple[bool, int, int]:
    """The order of service within a client: resumed answers first, then by priority, then by arrival.

    It does not order sequences of different clients, see shares.py.
    """
    return not sequence.moved, sequence.sampling.priority, sequence.number


def detached_sequence(ids: list[int], start_ids: Ids[int] = ()) -> Sequence:
    """A sequence for self-tests and probes, without a request or a reader."""
    return Sequence(Submission(prompt_ids=ids), MergingSlot(SamplingParameters()), frozenset(), start_ids)
