"""Several servers share a service's port, so that a busy event loop accepts calls quickly."""

import asyncio
import time

import grpc
import pytest

from headrace.errors import StartupError
from headrace.rpc.server.listeners import Listeners

CALLS, PER_CONNECTION = 64, 4
TURN_S = 0.005


class Counted(grpc.GenericRpcHandler):
    """`/test/counted`, whose calls wait until they are released; it counts those that have begun."""

    def __init__(self):
        self.begun = 0
        self.release = asyncio.Event()

    def service(self, details):
        async def counted(request, context):
            self.begun += 1
            await self.release.wait()
            return b""

        return grpc.unary_unary_rpc_method_handler(counted)


async def iterations_to_accept(count):
    """The number of iterations of a busy event loop until all calls of many connections have begun."""
    handler, listeners = Counted(), Listeners(count, (), ())
    listeners.add_generic_rpc_handlers((handler,))
    target = f"127.0.0.1:{listeners.add_insecure_port('127.0.0.1:0')}"
    await listeners.start()
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(target, options=own) for _ in range(CALLS // PER_CONNECTION)]
    try:
        for channel in channels:
            await asyncio.wait_for(channel.channel_ready(), 20)
        calls = [channel.unary_unary("/test/counted")(b"") for channel in channels for _ in range(PER_CONNECTION)]
        turns = 0
        while handler.begun < CALLS:
            time.sleep(TURN_S)  # noqa: ASYNC251  # As if the loop had hundreds of streams to serve.
            await asyncio.sleep(0)
            turns += 1
            assert turns < 100 * CALLS
        handler.release.set()
        await asyncio.gather(*calls)
        return turns
    finally:
        for channel in channels:
            await channel.close()
        await listeners.stop(None)


async def test_several_listeners_accept_in_a_fraction_of_the_iterations():
    alone, together = await iterations_to_accept(1), await iterations_to_accept(8)
    print(alone, together)
    assert together < alone / 2


async def test_no_other_server_can_use_the_port():
    first, second = Listeners(2, (), ()), Listeners(2, (), ())
    port = first.add_insecure_port("127.0.0.1:0")
    try:
        with pytest.raises(StartupError, match="is the port taken"):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        await first.stop(None)
        await second.stop(None)
