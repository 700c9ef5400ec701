"""Two gateways with a transformer each share four predictors on two other hosts, while one after the other fails.

In turn a predictor is killed, a gateway, a transformer, and a host is cut off and comes back. Clients whose connection
breaks continue at the other gateway: each gets the tokens of an undisturbed answer. 24 streams at a time for three
quarters of a minute, with FULL=1 64 for ten minutes. The test prints how often clients had to continue, and why.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, cycle

import grpc
import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.full import FULL
from tests.support.network import Host, why_not
from tests.system.calls import channel
from tests.system.predictor_process import predictor_process
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
PORTS = (9000, 9010)  # Of the predictors on each host.
SECONDS, STREAMS = (600, 64) if FULL else (45, 24)
STORIES, TOKENS, PACE = 16, 60, 10
CUT_S, PAUSE_S = 8, 2
BACK_S = 90
SILENCE_LIMIT_S = 3
# With which a stream ends whose gateway or transformer died.
BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}

pytestmark = pytest.mark.timeout(SECONDS + 400)


class Predictor:
    """One on a host, started again each time that it ends."""

    def __init__(self, log, host, port):
        self._log, self._host, self._port = log, host, port
        self._running = None
        self.target = f"{host.address}:{port}"
        self._serves = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        environment = {"NAMESPACE": self._host.namespace, "PREDICTOR_HOST": "0.0.0.0", "PREDICTOR_DTYPE": "fp32"}
        environment |= {"PREDICTOR_PORT": str(self._port)}
        while True:
            started = predictor_process(
                self._log,
                "tests.system.remote_predictor",
                self._host.address,
                SLOW_MS="1",
                MODELS=MODELS,
                **environment,
            )
            async with started as self._running:
                self._serves.set()
                await self._running.process.wait()

    async def wait_until_it_serves(self):
        serves = asyncio.create_task(self._serves.wait())
        done, _ = await asyncio.wait({serves, self._task}, timeout=BACK_S, return_when=asyncio.FIRST_COMPLETED)
        serves.cancel()
        if self._task in done:
            self._task.result()
        assert done, f"{self.target} does not serve"

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def kill(self):
        self._serves.clear()
        self._running.process.send_signal(signal.SIGKILL)


@pytest_asyncio.fixture
async def predictors(tmp_path):
    """Two on each of two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    with Host(seed=1) as one, Host(seed=2) as other:
        all_of_them = [
            Predictor(tmp_path / f"{h}-{port}.log", host, port) for h, host in enumerate((one, other)) for port in PORTS
        ]
        try:
            for predictor in all_of_them:
                await predictor.wait_until_it_serves()
            yield (one, other), all_of_them
        finally:
            await asyncio.gather(*(predictor.close() for predictor in all_of_them))


@pytest_asyncio.fixture
async def sides(predictors, stacks):
    """Two stacks without predictors of their own."""
    limits = {"TRANSFORMER_SILENCE_LIMIT": str(SILENCE_LIMIT_S), "TRANSFORMER_PREDICTOR_START_WAIT": "120"}
    used = {
        "models": MODELS,
        "predictors": 0,
        "predictor_endpoints": ",".join(predictor.target for predictor in predictors[1]),
        "environment": {"transformer": limits},
    }
    async with AsyncExitStack() as running:
        first = await running.enter_async_context(stacks.use(**used))
        # Another argument, or it would be the same stack.
        second = await running.enter_async_context(stacks.use(**used, gateway_trace_percent=0))
        yield first, second


class Crowd:
    """Clients that read one story after the other, at both gateways in turn, until the block ends."""

    def __init__(self, sides, answers):
        self._sides, self._answers = sides, answers
        self.right = 0
        self.wrong = []
        self.continued = Counter()  # By why.
        self._is_over = False

    @asynccontextmanager
    async def reading(self, clients):
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._read_stories(number))
            yield
            self._is_over = True

    async def _read_stories(self, number):
        gateways = cycle(random.sample(self._sides, len(self._sides)))
        for story in count(number):
            if self._is_over:
                return
            ids = await self._read(story % STORIES, gateways)
            if ids == self._answers[story % STORIES]:
                self.right += 1
            else:
                self.wrong.append((story, ids))

    async def _read(self, story, gateways):
        ids, resume_id, deadline = [], "", time.monotonic() + BACK_S
        while True:
            try:
                async for response in story_from(next(gateways).gateway, story, resume_id, PACE):
                    ids += response.token_ids
                    resume_id = response.resume_id
                return ids
            except grpc.aio.AioRpcError as error:
                if error.code() not in BROKEN or time.monotonic() > deadline:
                    raise
                self.continued[f"{error.code().name}: {error.details()}"[:80]] += 1
                await asyncio.sleep(0.2)


async def story_from(gateway, story, resume_id="", pace=0):
    request = headrace_pb2.GenerateRequest(
        model="storyteller", prompt="Once upon a time", seed=story, temperature=1.0, ignore_eos=True, max_tokens=TOKENS
    )
    request.pace, request.resume_from = pace, resume_id
    async with channel(gateway) as opened:
        async for response in headrace_pb2_grpc.TextGenerationStub(opened).Generate(request, timeout=BACK_S):
            yield response


async def ids_of(gateway, story):
    return [token_id async for response in story_from(gateway, story) for token_id in response.token_ids]


async def test_every_answer_is_right_while_predictors_gateways_transformers_and_hosts_fail(predictors, sides):
    hosts, all_predictors = predictors
    answers = [await ids_of(sides[0].gateway, story) for story in range(STORIES)]
    assert {len(ids) for ids in answers} == {TOKENS}
    assert answers == [await ids_of(sides[1].gateway, story) for story in range(STORIES)]

    async def cut(host):
        host.loss = 1.0
        await asyncio.sleep(CUT_S)
        host.loss = 0.0

    faults = {
        "kills of predictors": [predictor.kill for predictor in all_predictors],
        "cuts of hosts": [lambda host=host: cut(host) for host in hosts],
        "kills of gateways": [lambda side=side: side.kill("envoy") for side in sides],
        "kills of transformers": [lambda side=side: side.kill("transformer") for side in sides],
    }
    turns, done = {name: cycle(each) for name, each in faults.items()}, Counter()
    crowd, end = Crowd(sides, answers), time.monotonic() + SECONDS
    async with crowd.reading(STREAMS):
        for name in cycle(turns):
            await next(turns[name])()
            done[name] += 1
            # The next fault comes when this one is healed: clients need one gateway, and that one predictor.
            for predictor in all_predictors:
                await predictor.wait_until_it_serves()
            for side in sides:
                await side.wait_ready(BACK_S)
            await asyncio.sleep(PAUSE_S)
            if time.monotonic() > end and len(done) == len(faults):
                break
    print(f"{crowd.right} answers; {dict(done)}; continued: {dict(crowd.continued)}")
    assert not crowd.wrong
    assert crowd.right >= STREAMS
    await until(lambda: serves_again(sides), BACK_S)


async def serves_again(sides):
    return [len(await ids_of(side.gateway, 0)) for side in sides] == [TOKENS] * len(sides)
