"""What a request allows as its next token: the tokens that it names, and where its answer is in its grammar.

The place in a grammar is a function of the answer's output ids alone, so that it can continue anywhere. The mask of the
next token has a bit for each id of the vocabulary and, behind them, one for the end of the answer. An answer that can
only end is complete; it needs no end token.

Where the text can go on in one way only, the mask allows one token: the first of that text as the tokenizer splits it.
Such a token is known without the mask and without the model. Where the tokenizer reads a special token in that text,
which is none to the grammar, it is the longest ordinary token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError, InvalidRequestError
from headrace.grammars import PARAMETER, grammar_error
from headrace.sampling import SamplingParameters

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# CPU seconds that a grammar may take: these, and those for each token.
_CPU_S, _CPU_S_PER_TOKEN = 1.0, 0.01
_WORD = 32  # Bits: llguidance writes whole words.


class Restrictions(NamedTuple):
    """Ids with the numbers that are added to their logits, the only ids that may be generated if there are any, and
    sequences of ids: the last id of each is masked after the ones before it."""

    biased_ids: NDArray[np.int64]
    biases: NDArray[np.float64]
    allowed_ids: NDArray[np.int64]
    bad: Sequence[tuple[int, ...]]

    def bad_ids(self, output_ids: Sequence[int] | NDArray[Any]) -> list[int]:
        """The ids that would complete a bad sequence within the output."""
        produced = len(output_ids)
        last = int(output_ids[-1]) if produced else None
        return [
            sequence[-1]
            for sequence in self.bad
            if len(sequence) == 1
            or (
                sequence[-2] == last
                and len(sequence) <= produced + 1
                and sequence[:-1] == tuple(output_ids[produced + 1 - len(sequence) :])
            )
        ]

    def check(self, end_ids: frozenset[int], vocabulary_size: int) -> None:
        """Refuses restrictions that could leave no token; `end_ids` are masked too at some time."""
        masked = end_ids.union(sequence[-1] for sequence in self.bad)
        if self.allowed_ids.size and masked.issuperset(self.allowed_ids.tolist()):
            raise InvalidRequestError("bad words or min_tokens leave no allowed token", param="allowed_token_ids")
        if len(masked) >= vocabulary_size:
            raise InvalidRequestError("no token of the vocabulary is left", param="bad_token_ids")


def restrictions_of(sampling: SamplingParameters) -> Restrictions | None:
    """The restrictions of a request, None if it has none."""
    if not sampling.has_restrictions:
        return None
    return Restrictions(
        _ids(sampling.logit_bias),
        np.fromiter(sampling.logit_bias.values(), np.float64),
        _ids(sampling.allowed_token_ids),
        sampling.bad_token_ids,
    )


def _ids(ids: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64)


class Constraint:
    """See the module. Used by one thread at a time.

    `end_bit` is the mask's last bit. `end_ids` end the answer where it may end; `eos_ids`, the model's own, are never
    text of it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        end_bit: int,
        end_ids: Iterable[int],
        eos_ids: Iterable[int],
    ) -> None:
        self.end_bit = end_bit
        self.mask_bytes = (end_bit // _WORD + 1) * _WORD // 8
        self.end_ids = list(end_ids)
        self.eos_ids = list(eos_ids)
        self.is_complete = matcher.is_stopped()
        self.error: HeadraceError | None = None
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._left_s = _CPU_S

    @property
    def has_ended(self) -> bool:
        """Whether there is no next token."""
        return self.is_complete or self.error is not None

    def replay(self, output_ids: Ids[int]) -> None:
        """Takes the tokens of an answer's beginning; raises InvalidRequestError for those that it cannot have."""
        for token_id in output_ids:
            if self.is_complete or not self._matcher.consume_token(token_id):
                raise InvalidRequestError(f"output_ids do not match {PARAMETER}", param="output_ids")
            self.is_complete = self._matcher.is_stopped()

    def take(self, token_id: int) -> None:
        """Takes the answer's next token, one that the mask allows."""
        started = time.thread_time()
        self._matcher.consume_token(token_id)
        self.is_complete = self._matcher.is_stopped()
        self._spend(time.thread_time() - started - _CPU_S_PER_TOKEN)

    def forced(self) -> int | None:
        """The next token, if the grammar leaves no choice."""
        if self.has_ended:
            return None
        started = time.thread_time()
        ids = self._matcher.compute_ff_tokens()
        token_id = self._ordinary(ids[0]) if ids else None
        self._spend(time.thread_time() - started)
        if self.error is not None or token_id is None or token_id >= self.end_bit or token_id in self.eos_ids:
            return None
        return token_id

    def _ordinary(self, token_id: int) -> int | None:
        """A forced token, or the one in place of a special token that only the tokenizer reads in the text."""
        if self._matcher.validate_tokens([token_id]) == 1:
            return token_id
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        return next(iter(self._tokenizer.greedy_tokenize(text)), None)

    def fill(self, mask: NDArray[np.uint8]) -> None:
        """Writes the mask of the next token, lower bits first; it is meaningless after an error."""
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        words = np.flatnonzero(mask)
        if len(words) == 1 and (token_id := 8 * int(words[0]) + int(mask[words[0]]).bit_length() - 1) != self.end_bit:
            found = self._ordinary(token_id)
            if found is not None and found != token_id:
                mask[words[0]] = 0
                mask[found // 8] |= 1 << found % 8
        self._spend(time.thread_time() - started)

    def stop(self, is_complete: bool) -> None:
        """There is no next token: the answer is complete, or no token of the vocabulary continues it."""
        self.is_complete = is_complete
        if not is_complete:
            self._fail("no token of the model's vocabulary continues the answer")

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds
        if self._matcher.is_error():
            self._fail(f"the grammar is too complex at this point: {self._matcher.get_error()}")
        elif self._left_s < 0:
            self._fail("the grammar takes too much time")

    def _fail(self, reason: str) -> None:
        self.is_complete, self.error = False, grammar_error(reason)
