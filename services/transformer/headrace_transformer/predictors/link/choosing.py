"""Which predictor gets the next generation: the least loaded one, or the one that has the prompt's beginning cached.

Prompts with the same beginning go to the same predictor (rendezvous hashing over the first blocks of the prompt), so
that its prefix cache serves them, unless it has more than `_MOST_OF_SHARE` times its share of the generations in
flight. Pure.

Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (rendezvous hashing); Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (the bound).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MOST_OF_SHARE = 1.25
_BLOCK_TOKENS = 32  # Of the predictor's prefix cache: less is never shared.
_MOST_BLOCKS = 4


class Candidate(NamedTuple):
    """A predictor that could take the generation, and how many it has in flight."""

    address: str
    in_flight: int


def prefix_key(model: str, cache_salt: str, prompt_ids: Sequence[int], client: str = "") -> bytes | None:
    """Identifies the beginning of a client's prompt; None if it is too short to be cached."""
    count = min(len(prompt_ids) // _BLOCK_TOKENS, _MOST_BLOCKS) * _BLOCK_TOKENS
    if not count:
        return None
    ids = np.array(prompt_ids[:count], dtype=np.int32).tobytes()
    digest = hashlib.blake2b(ids, key=cache_salt.encode()[:64], person=b"prefix", digest_size=16).digest()
    return b"\0".join((digest + model.encode(), client.encode())) if client else digest + model.encode()


def choose(candidates: Sequence[Candidate], key: bytes | None) -> int:
    """The index of the chosen candidate, of which there is at least one."""
    if len(candidates) == 1:
        return 0
    if key is not None:
        preferred = max(range(len(candidates)), key=lambda index: _weight(key, candidates[index].address))
        share = (sum(candidate.in_flight for candidate in candidates) + 1) / len(candidates)
        if candidates[preferred].in_flight + 1 <= math.ceil(_MOST_OF_SHARE * share):
            return preferred
    least = min(candidate.in_flight for candidate in candidates)
    # Several transformers that choose at the same time should not choose the same.
    return random.choice([i for i, candidate in enumerate(candidates) if candidate.in_flight == least])  # noqa: S311


def _weight(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()
