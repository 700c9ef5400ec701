"""Expensive wrong requests do not affect other callers: attacks for two seconds each beside honest callers.

There is one attack on each resource; with FULL=1 all attacks run.
`python -m tests.fuzz.neighbours` takes longer for each and measures: bench/results/neighbours.json.
"""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.fuzz.attacks import ATTACKS
from tests.fuzz.honest import Honest
from tests.fuzz.neighbours import attacked_stack, beside
from tests.support.full import FULL

SECONDS = 2.0
# The resources that they attack: the header table, a core in Python, a core in a template, an event loop, memory of the
# gateway, memory of the predictor, idle calls, slots of a model; then connections, streams and frames; last what one
# caller has a share of.
ONE_OF_A_KIND = (
    "malformed_timeouts",
    "long_lists_for_many_choices",
    "long_chats",
    "huge_json_documents",
    "unfinished_bodies",
    "large_good_tensors",
    "idle_streams",
    "quick_cancels",
    "slow_headers",
    "slow_readers",
    "rapid_resets",
    "header_bombs",
    "continuation_floods",
    "paced_streams",
    "slow_grammars",
    "forged_resume_ids",
    "unknown_responses",
    "template_without_end",
    "tokens_at_the_predictor",
)
RUN = tuple(ATTACKS) if FULL else ONE_OF_A_KIND
# The limit of health checks, far above the time of an answer beside any attack on a busy machine.
SLOWEST_MS = 5000.0

pytestmark = pytest.mark.timeout(300)


@pytest_asyncio.fixture(scope="module")
async def stack(tmp_path_factory):
    async with attacked_stack(tmp_path_factory.mktemp("attacked")) as started:
        yield started


@pytest_asyncio.fixture(scope="module")
async def honest(stack):
    async with Honest(stack.gateway) as callers:
        await callers.settled(callers.phase())
        yield callers


@pytest.mark.parametrize("attack", RUN)
async def test_neighbours_of_an_attack_get_their_answers(stack, honest, attack):
    outcome = await beside(stack, honest, attack, SECONDS, comes_back_s=0.0)
    late = [f"p99 of {kind}: {p99_ms} ms" for kind, p99_ms in outcome.attacked_p99_ms.items() if p99_ms > SLOWEST_MS]
    assert not [*outcome.failures, *late]
