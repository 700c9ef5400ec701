"""`decoupled`: one request, many responses, as Triton's own unmodified clients ask for them.

Here is what takes a fault or a model that stands still: how much a chunk holds and how long it is held back, and a
stream whose predictor dies. What the clients do beside that (many requests on one stream, ids, final responses, errors
on the stream, a model.py of one's own) they show in tests/conformance and tests/system/test_tensor_models.py; the
hour is in test_idle_gaps.py.
"""

import asyncio
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest_asyncio

from millrace_protos import millrace_pb2_grpc
from tests.chaos.asks import Story
from tests.chaos.load import Client, text_request
from tests.conformance.conftest import CHUNKS
from tests.system.gated_stack import gated_stack
from tests.system.own_clients import python_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "clients" / "broken_stream.py"
TIMEOUT_S = 15


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack whose model makes as many tokens as the second value is called with."""
    async with gated_stack(tmp_path_factory.mktemp("gated")) as gated:
        yield gated


def chunked(tokens, **chunks):
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **chunks}
    return Story("Once upon a time", tuple(sampling.items()))


async def test_a_chunk_has_as_many_tokens_as_were_asked_for_and_the_last_one_what_is_left(gated):
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


async def test_a_token_is_held_back_no_longer_than_was_asked_for(gated):
    stack, let_tokens_be_made = gated
    story = chunked(3, chunk_tokens=100, chunk_ms=20)
    async with Client(stack.gateway) as client, aclosing(_sizes(client, story)) as sizes:
        for _ in range(3):
            let_tokens_be_made(1)
            # The model stands still: what it has made must come, or nothing ever will.
            async with asyncio.timeout(TIMEOUT_S):
                assert await anext(sizes) == 1


async def _sizes(client, story):
    """How many tokens each message brings."""
    stub = millrace_pb2_grpc.TextGenerationStub(client.channel())
    call = stub.Generate(text_request(story, "chunked"))
    try:
        async for response in call:
            yield len(response.token_ids)
    finally:
        call.cancel()


async def test_tritons_client_sees_a_pause_where_its_predictor_dies_in_the_middle_of_its_streams(new_stack, tmp_path):
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
            said, complained = await client.communicate(b"\n")
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert (begun, said) == (b"begun\n", b"done\n"), complained.decode()
