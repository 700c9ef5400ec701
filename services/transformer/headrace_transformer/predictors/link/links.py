"""Keeps one link for each address of a predictor, and chooses the predictor of a generation.

Among those of the lowest rank that serve (resolver.py) it is the least loaded one, or the one that has the prompt's
beginning cached. Prompts with the same beginning go to the same predictor (rendezvous hashing over the first blocks of
the prompt), so that its prefix cache serves them, unless it has more than `_MOST_OF_SHARE` times its share of the
generations in flight. Owned by the event loop; `choose` is pure.

Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (rendezvous hashing); Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (the bound).
"""

import asyncio
import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from itertools import count

import numpy as np

from headrace.errors import NotReadyError, OtherWeightsError
from headrace.telemetry.page import PickableLoad
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.predictors.discovery.resolver import Resolver
from headrace_transformer.predictors.link.link import PredictorLink
from headrace_transformer.predictors.link.link_call import Link

_RESOLVE_INTERVAL_S = 1.0
_UNLISTED_S = 10.0  # After which an address that its name has no more is treated as one of a predictor that leaves.
_MOST_OF_SHARE = 1.25
_BLOCK_TOKENS = 32  # Of the predictor's prefix cache: less is never shared.
_MOST_BLOCKS = 4


def prefix_key(model: str, cache_salt: str, prompt_ids: Sequence[int], client: str = "") -> bytes | None:
    """Identifies the beginning of a client's prompt; None if it is too short to be cached."""
    length = min(len(prompt_ids) // _BLOCK_TOKENS, _MOST_BLOCKS) * _BLOCK_TOKENS
    if not length:
        return None
    ids = np.array(prompt_ids[:length], dtype=np.int32).tobytes()
    digest = hashlib.blake2b(ids, key=cache_salt.encode()[:64], person=b"prefix", digest_size=16).digest()
    return b"\0".join((digest + model.encode(), client.encode())) if client else digest + model.encode()


def choose(in_flight: Mapping[str, int], key: bytes | None) -> str:
    """The address that gets the next generation, of those with so many in flight, of which there is at least one."""
    if key is not None:
        preferred = max(in_flight, key=lambda address: _weight(key, address))
        share = (sum(in_flight.values()) + 1) / len(in_flight)
        if in_flight[preferred] + 1 <= math.ceil(_MOST_OF_SHARE * share):
            return preferred
    fewest = min(in_flight.values())
    # Several transformers that choose at the same time should not choose the same.
    return random.choice([address for address, calls in in_flight.items() if calls == fewest])  # noqa: S311


def _weight(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()


class Links:
    """The links to all predictors; `addresses` are host:port, a name standing for all its addresses, or services."""

    def __init__(self, addresses: Sequence[str], silence_limit_s: float) -> None:
        self._resolver = Resolver(addresses)
        self._silence_limit_s = silence_limit_s
        self._links: dict[str, PredictorLink] = {}
        self.listed: Mapping[str, int] = {}  # The addresses behind the names now, with their ranks.
        # Set, and replaced, when a predictor reports other models or weights, or begins to leave; not when one is lost.
        self.changed = asyncio.Event()

    @property
    def all(self) -> list[PredictorLink]:
        """The links in the order of their names."""
        return sorted(self._links.values(), key=lambda link: (len(link.name), link.name))

    def pickable(self) -> dict[str, PickableLoad]:
        """The load of each model at all predictors, by their latest reports, of at least each second; on any thread."""
        all_loads = [load for link in self.all for load in link.loads.values()]
        found = {}
        for model in dict.fromkeys(load.model for load in all_loads):
            loads = [load for load in all_loads if load.model == model]
            running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
            found[model] = PickableLoad(running, waiting, 1 - sum(load.cache_free for load in loads) / len(loads))
        return found

    async def run(self) -> None:
        """Keeps a link to each address, until cancelled."""
        try:
            while True:
                await self._follow_addresses()
                await asyncio.sleep(_RESOLVE_INTERVAL_S)
        finally:
            await asyncio.gather(self._resolver.close(), *(link.close() for link in self._links.values()))

    def notify(self) -> None:
        """Wakes everything that waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def choose(
        self,
        submission: Submission,
        fingerprint: str,
        cache_salt: str = "",
        besides: Collection[Link | None] = (),
    ) -> PredictorLink:
        """Chooses a link for the next call of a generation, whose cached prefixes have the salt.

        `fingerprint`: the weights that began its answer, "" before the first token. `besides`: links to leave out.
        Raises NotReadyError, or OtherWeightsError if the model is served with other weights only.
        """
        serving = [
            link
            for link in self._links.values()
            if submission.model in link.loads and not link.is_leaving and link not in besides
        ]
        if not serving:
            are_up = any(link.loads for link in self._links.values())
            what = f"has model {submission.model!r} ready" if are_up else "is ready"
            raise NotReadyError(f"no predictor {what}", hop="predictor")
        if fingerprint:
            serving = [link for link in serving if link.loads[submission.model].fingerprint == fingerprint]
            if not serving:
                raise OtherWeightsError("no predictor has the weights that began the answer", hop="predictor")
        first = min(link.rank for link in serving)
        serving = [link for link in serving if link.rank == first]
        if len(serving) == 1:
            return serving[0]
        key = prefix_key(submission.model, cache_salt, submission.prompt_ids, submission.client)
        return self._links[choose({link.address: link.in_flight(submission.model) for link in serving}, key)]

    def can_resume(self, model: str, fingerprint: str) -> bool:
        """Whether a predictor that stays would resume a stream of these weights, any weights for ""."""
        return any(
            model in link.loads and not link.is_leaving and fingerprint in ("", link.loads[model].fingerprint)
            for link in self._links.values()
        )

    def _free_name(self) -> str:
        """The first of predictor-0, predictor-1, … that no link has."""
        taken = {link.name for link in self._links.values()}
        return next(name for number in count() if (name := f"predictor-{number}") not in taken)

    async def _follow_addresses(self) -> None:
        addresses = await self._resolver.addresses()
        self.listed = {address: self._resolver.rank(address) for address in addresses}
        now = asyncio.get_running_loop().time()
        for address in addresses:
            if address not in self._links:
                self._links[address] = PredictorLink(address, self._free_name(), self._silence_limit_s, self.notify)
            self._links[address].listed_at = now
            self._links[address].rank = self.listed[address]
        for address, link in tuple(self._links.items()):
            # A name may be missing for a moment: a link that is up stays, and gets new calls too; without any address
            # left, for as long as it is up.
            link.set_unlisted(bool(addresses) and now - link.listed_at > _UNLISTED_S)
            if address not in addresses and link.is_idle and (link.is_leaving or not link.loads):
                await self._links.pop(address).close()
