"""On every streaming way in, chunk i reaches the client before the model makes chunk i + 1.

The ways by HTTP are read through `curl -N`.
"""

import asyncio
from contextlib import aclosing

import pytest
import pytest_asyncio

from bench.streams import HAS_CURL, WAYS_IN
from tests.system.gated_stack import gated_stack

TOKENS = 12
BY_GRPC = ("Generate", "ModelStreamInfer")


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack whose model makes as many tokens as the second value is called with."""
    async with gated_stack(tmp_path_factory.mktemp("gated")) as gated:
        yield gated


@pytest.mark.parametrize("name", WAYS_IN)
async def test_each_chunk_arrives_before_the_next_one_is_made(gated, name):
    if name not in BY_GRPC and not HAS_CURL:
        pytest.skip("curl is not installed")
    stack, let_tokens_be_made = gated
    async with aclosing(WAYS_IN[name](stack.gateway, "storyteller", TOKENS, f"gated {name}")) as chunks:
        texts = []
        for _ in range(TOKENS):
            let_tokens_be_made(1)
            # The model stands still: what it has made must come, or nothing ever will.
            async with asyncio.timeout(15):
                texts.append(await anext(chunks))
        assert [text for text in texts if text]
        assert len(texts) == TOKENS
        async with asyncio.timeout(15):
            assert await anext(chunks, None) is None
