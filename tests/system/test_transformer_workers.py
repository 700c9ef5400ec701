"""Several transformers on one port, behind the real Envoy: all work, and one that dies is soon replaced."""

import asyncio
import os
import signal

import psutil

from tests.prometheus import read_page
from tests.system.calls import channel, generate, serves, text_of
from tests.waiting import until

MODELS = "storyteller=models/storyteller"


def workers(stack):
    return psutil.Process(stack.pid("transformer")).children()


def connections(worker, port):
    return [c for c in worker.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED]


async def test_workers_share_the_port_and_replace_each_other(new_stack):
    stack = await new_stack(models=MODELS, environment={"transformer": {"TRANSFORMER_WORKERS": "2"}})
    port = int(stack.addresses["transformer"].rpartition(":")[2])

    async def tell(seed=1):
        return text_of(await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=8, seed=seed))

    alone = await tell()
    assert await asyncio.gather(*(tell() for _ in range(16))) == [alone] * 16

    open_channels = []
    try:

        async def both_have_connections():
            open_channels.append(channel(stack.addresses["transformer"]))
            await open_channels[-1].channel_ready()
            return all(connections(worker, port) for worker in workers(stack))

        await until(lambda: len(workers(stack)) == 2)
        await until(both_have_connections)
    finally:
        for open_channel in open_channels:
            await open_channel.close()

    # The page on the service's port has the counts of both.
    [(_, page, _)] = stack.metrics_pages["transformer"]
    samples = await asyncio.to_thread(read_page, page)
    begun = {
        s.labels["worker"]: s.value for s in samples if s.name == "gen_ai_server_time_to_first_token_seconds_count"
    }
    assert sum(begun.values()) == 17
    assert {s.labels["worker"] for s in samples} == {"0", "1"}

    killed = workers(stack)[0].pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(workers(stack)) == 2 and killed not in [worker.pid for worker in workers(stack)])

    async def all_serve():
        return all([await serves(stack.addresses["transformer"], "ready") for _ in range(8)])

    await until(all_serve)
    assert await asyncio.gather(*(tell() for _ in range(8))) == [alone] * 8
    assert "starting it again" in stack.log("transformer")

    left = workers(stack)
    await stack.kill("transformer", signal.SIGTERM)
    assert not psutil.wait_procs(left, timeout=60)[1]
