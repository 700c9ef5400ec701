"""`decoupled`: one request, many responses, as Triton's unmodified clients use them.

These are the tests that need a fault or a gated model: how much a chunk holds, how long it is held back, and a
stream whose predictor dies. The other uses by these clients (many requests on one stream, ids, final responses, errors
on the stream, a user's model.py) are in tests/conformance and tests/system/test_tensor_models.py; the
hour of silence is in test_idle_gaps.py.
"""

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest_asyncio

from headrace_protos import headrace_pb2_grpc
from tests.chaos.load import Client, text_request
from tests.chaos.requests import Story
from tests.conformance.conftest import CHUNKS
from tests.system.gated_stack import gated_stack
from tests.system.own_clients import python_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "clients" / "broken_stream.py"
TIMEOUT_S = 15


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack, and a function that lets its model generate so many tokens."""
    async with gated_stack(tmp_path_factory.mktemp("gated")) as gated:
        yield gated


def chunked(tokens, **chunks):
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **chunks}
    return Story("Once upon a time", tuple(sampling.items()))


async def test_a_chunk_has_the_requested_number_of_tokens_and_the_last_one_the_rest(gated):
    stack, let_tokens_be_made = gated
    async with Client(stack.gateway) as client, aclosing(_sizes(client, chunked(11, chunk_tokens=4))) as sizes:
        async with asyncio.timeout(TIMEOUT_S):
            let_tokens_be_made(4)
            assert await anext(sizes) == 4
            let_tokens_be_made(3)
            let_tokens_be_made(1)
            assert await anext(sizes) == 4
            let_tokens_be_made(3)
            assert await anext(sizes) == 3


async def test_a_token_is_held_back_no_longer_than_requested(gated):
    stack, let_tokens_be_made = gated
    story = chunked(3, chunk_tokens=100, chunk_ms=20)
    async with Client(stack.gateway) as client, aclosing(_sizes(client, story)) as sizes:
        for _ in range(3):
            let_tokens_be_made(1)
            # The model waits: if the tokens so far do not arrive now, they never will.
            async with asyncio.timeout(TIMEOUT_S):
                assert await anext(sizes) == 1


async def _sizes(client, story):
    """The number of tokens in each message."""
    stub = headrace_pb2_grpc.TextGenerationStub(client.channel())
    call = stub.Generate(text_request(story, "chunked"))
    try:
        async for response in call:
            yield len(response.token_ids)
    finally:
        call.cancel()


async def test_tritons_client_sees_only_a_pause_when_its_predictor_dies_during_its_streams(new_stack, tmp_path):
    python = python_of()
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "model.py").write_text(CHUNKS)
    stack = await new_stack(
        models=f"storyteller=models/storyteller,chunks={tmp_path / 'chunks'}",
        commands={"predictor": (sys.executable, "-m", "tests.system.slow_predictor")},
        environment={"predictor": {"SLOW_MS": "40"}},
    )
    client = await asyncio.create_subprocess_exec(
        *(python, str(SCRIPT), stack.gateway),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            begun = await client.stdout.readline()
            await stack.kill("predictor-0")
            output, errors = await client.communicate(b"\n")
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert (begun, output) == (b"begun\n", b"done\n"), errors.decode()
