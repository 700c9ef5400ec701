"""`logged_stream`: logging does not end streaming, whatever happens to the logger.

The logger has a sink that takes ten seconds per event. On every streaming way in, chunk i reaches the client before the
model makes chunk i + 1 while that logger runs, is stopped, or dies again and again. Afterwards the log holds
each answer once, with every chunk.
"""

import asyncio
import signal
from contextlib import aclosing, asynccontextmanager, suppress

import grpc
import pytest
import pytest_asyncio

from tests.chaos.load import Client
from tests.chaos.requests import Request, greedy
from tests.system.calls import query
from tests.system.gated_stack import gated_stack
from tests.waiting import until

SINK_DELAY_S = 10


@asynccontextmanager
async def slow_sink():
    """The address of an HTTP server that is slow for every event."""
    answering = set()

    async def answer(reader, writer):
        answering.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(SINK_DELAY_S)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in answering:
            task.cancel()


@asynccontextmanager
async def runs(stack):
    yield


@asynccontextmanager
async def stands_still(stack):
    await stack.kill("logger", signal.SIGSTOP)
    try:
        yield
    finally:
        await stack.kill("logger", signal.SIGCONT)


@asynccontextmanager
async def dies_again_and_again(stack):
    async def kill_for_ever():
        while True:
            with suppress(ProcessLookupError):
                await stack.kill("logger")
            await asyncio.sleep(0.05)

    killer = asyncio.create_task(kill_for_ever())
    try:
        yield
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)


TROUBLES = {"runs": runs, "stands still": stands_still, "dies again and again": dies_again_and_again}

TOKENS = 8
WAYS = (
    *("Generate", "ModelStreamInfer", "completions", "chat completions"),
    *("generate_stream", "headrace generate", "gRPC-Web"),
)
# Every way in without trouble, and two of them in each trouble; with FULL=1 all.
IN_TROUBLE = ("Generate", "chat completions")
ROWS = [
    pytest.param(name, trouble, marks=[] if trouble == "runs" or name in IN_TROUBLE else pytest.mark.full)
    for name in WAYS
    for trouble in TROUBLES
]


@pytest_asyncio.fixture(scope="module")
async def logged(tmp_path_factory):
    """A stack with a slow sink, and a function that lets its model generate so many tokens."""
    async with (
        slow_sink() as sink,
        gated_stack(tmp_path_factory.mktemp("logged"), logger={"LOGGER_SINKS": sink}) as gated,
    ):
        yield gated


@pytest.mark.parametrize(("name", "trouble"), ROWS)
async def test_each_chunk_arrives_before_the_next_one_is_generated_and_all_are_recorded(logged, name, trouble):
    stack, let_tokens_be_made = logged
    request_id = f"{name} {trouble}".replace(" ", "-")
    story = greedy("Tell me a story about a fox.", TOKENS, is_chat=name == "chat completions")
    async with (
        TROUBLES[trouble](stack),
        Client(stack.gateway) as client,
        aclosing(client.pieces(Request(request_id, name, story))) as pieces,
    ):
        texts = []
        for _ in range(TOKENS):
            let_tokens_be_made(1)
            # The model waits: if the tokens so far do not arrive now, they never will.
            texts.append((await anext(pieces)).text)
        assert await anext(pieces, None) is None

    async def recorded():
        with suppress(grpc.aio.AioRpcError):  # The gateway notices within a second that the logger is back.
            return await query(stack.gateway, request_id=request_id)

    (record,) = await until(recorded)
    assert (record.status, record.incomplete) == ("OK", False)
    assert [chunk.text for chunk in record.chunks] == texts
    assert record.text == "".join(texts)
