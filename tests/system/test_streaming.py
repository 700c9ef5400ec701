"""On every streaming way in, chunk i reaches the client before the model makes chunk i + 1.

The ways by HTTP are read through `curl -N`.
"""

import asyncio
import socket
import sys
from contextlib import aclosing

import pytest
import pytest_asyncio

from bench.streams import HAS_CURL, WAYS_IN
from runner.free_ports import start_stack

TOKENS = 12
BY_GRPC = ("Generate", "ModelStreamInfer")


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack whose model makes a token for each call of the second value."""
    folder = tmp_path_factory.mktemp("gated")
    path = str(folder / "gate")
    stack = await start_stack(
        folder,
        {"models": "storyteller=models/storyteller"},
        commands={"predictor": (sys.executable, "-m", "tests.system.gated_predictor")},
        environment={"predictor": {"GATE_SOCKET": path}},
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        yield stack, lambda: sender.sendto(b"1", path)
    await stack.stop()


@pytest.mark.parametrize("name", WAYS_IN)
async def test_each_chunk_arrives_before_the_next_one_is_made(gated, name):
    if name not in BY_GRPC and not HAS_CURL:
        pytest.skip("curl is not installed")
    stack, let_one_token_be_made = gated
    async with aclosing(WAYS_IN[name](stack.gateway, "storyteller", TOKENS, f"gated {name}")) as chunks:
        texts = []
        for _ in range(TOKENS):
            let_one_token_be_made()
            # The model stands still: what it has made must come, or nothing ever will.
            async with asyncio.timeout(15):
                texts.append(await anext(chunks))
        assert [text for text in texts if text]
        assert len(texts) == TOKENS
        async with asyncio.timeout(15):
            assert await anext(chunks, None) is None
