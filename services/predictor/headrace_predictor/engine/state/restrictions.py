"""The changes that a request makes to the logits of single tokens, in the form that the sampler reads at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidRequestError
from headrace.sampling import SamplingParameters


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
