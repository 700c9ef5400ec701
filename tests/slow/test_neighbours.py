"""Expensive wrong requests do not affect other callers: attacks for two seconds each beside honest callers.

`python -m tests.fuzz.neighbours` takes longer for each and measures: bench/results/neighbours.json.
"""

import pytest
import pytest_asyncio

from tests.fuzz.attacks import ATTACKS
from tests.fuzz.honest import Honest
from tests.fuzz.neighbours import attacked_stack, beside

SECONDS = 2.0
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


@pytest.mark.parametrize("attack", ATTACKS)
async def test_neighbours_of_an_attack_get_their_answers(stack, honest, attack):
    outcome = await beside(stack, honest, attack, SECONDS, comes_back_s=0.0)
    late = [f"p99 of {kind}: {p99_ms} ms" for kind, p99_ms in outcome.attacked_p99_ms.items() if p99_ms > SLOWEST_MS]
    assert not [*outcome.failures, *late]
