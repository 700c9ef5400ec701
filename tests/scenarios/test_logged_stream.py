"""`logged_stream`: turning on logging does not end streaming, whatever becomes of the logger.

On every streaming way in, chunk i reaches the client before the model makes chunk i + 1 while the logger runs,
stands still, dies again and again, or has a sink that takes ten seconds an event; and afterwards the log holds each
answer once, with every chunk.
"""

import asyncio
import signal
import socket
import sys
from contextlib import aclosing, asynccontextmanager, suppress

import grpc
import pytest
import pytest_asyncio

from bench.streams import HAS_CURL, WAYS_IN
from millrace.protos import millrace_pb2, millrace_pb2_grpc
from runner.free_ports import start_stack
from tests.system.calls import channel
from tests.waiting import until

TOKENS = 8
BY_GRPC = ("Generate", "ModelStreamInfer")
SINK_DELAY_S = 10


@asynccontextmanager
async def slow_sink():
    """The address of an HTTP server that takes its time for every event."""
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
    yield
    await stack.kill("logger", signal.SIGCONT)


@asynccontextmanager
async def dies_again_and_again(stack):
    async def kill_for_ever():
        while True:
            with suppress(ProcessLookupError):
                await stack.kill("logger")
            await asyncio.sleep(0.05)

    killer = asyncio.create_task(kill_for_ever())
    yield
    killer.cancel()
    await asyncio.gather(killer, return_exceptions=True)


TROUBLES = {
    "runs": runs,
    "stands still": stands_still,
    "dies again and again": dies_again_and_again,
    "has a slow sink": runs,
}


@pytest_asyncio.fixture(scope="module", params=TROUBLES)
async def logged(request, tmp_path_factory):
    """A stack whose model makes a token for each call of the second value, and what troubles its logger."""
    folder = tmp_path_factory.mktemp("logged")
    path = str(folder / "gate")
    async with slow_sink() as sink:
        environment = {"predictor": {"GATE_SOCKET": path}}
        if request.param == "has a slow sink":
            environment["logger"] = {"LOGGER_SINKS": sink}
        stack = await start_stack(
            folder,
            {"models": "storyteller=models/storyteller"},
            commands={"predictor": (sys.executable, "-m", "tests.system.gated_predictor")},
            environment=environment,
        )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                yield stack, lambda: sender.sendto(b"1", path), TROUBLES[request.param]
        finally:
            await stack.stop()


async def records(stack, request_id):
    async with channel(stack.gateway) as open_channel:
        stub = millrace_pb2_grpc.PayloadLogStub(open_channel)
        return [record async for record in stub.Query(millrace_pb2.QueryPayloadsRequest(request_id=request_id))]


@pytest.mark.parametrize("name", WAYS_IN)
async def test_each_chunk_arrives_before_the_next_one_is_made_and_all_are_recorded(logged, name):
    if name not in BY_GRPC and not HAS_CURL:
        pytest.skip("curl is not installed")
    stack, let_one_token_be_made, trouble = logged
    request_id = name.replace(" ", "-")
    async with trouble(stack), aclosing(WAYS_IN[name](stack.gateway, "storyteller", TOKENS, request_id)) as chunks:
        texts = []
        for _ in range(TOKENS):
            let_one_token_be_made()
            # The model stands still: what it has made must come, or nothing ever will.
            async with asyncio.timeout(15):
                texts.append(await anext(chunks))
        async with asyncio.timeout(15):
            assert await anext(chunks, None) is None

    async def is_recorded():
        with suppress(grpc.aio.AioRpcError):  # The gateway finds out in a second that the logger is back.
            return await records(stack, request_id)

    await until(is_recorded, timeout_s=30)
    (record,) = await records(stack, request_id)
    assert (record.status, record.incomplete) == ("OK", False)
    assert [chunk.text for chunk in record.chunks] == texts
    assert record.text == "".join(texts)
