"""Requests from 64 threads, with cancels, deadlines and slow readers: every one has the right end.

500 requests a round; 2,000 with FULL=1.
"""

import asyncio
import math
import random
import threading
import time
import zlib
from array import array
from collections import Counter, deque

import psutil
import torch

from headrace.errors import DeadlineError, OverloadedError, RequestFailedError
from tests.model.fakes import END, VOCABULARY, FakeRunner, make_engine, request
from tests.support.full import FULL

REQUESTS = 2000 if FULL else 500
THREADS = 64
BLOCKS = 1 + 60

_TABLE = torch.randn(1009, VOCABULARY, generator=torch.Generator().manual_seed(1))
_TABLE[:, END] = -torch.inf
_LIKELIEST = _TABLE.argmax(-1).tolist()


def _entry(ids):
    return zlib.crc32(array("q", ids).tobytes()) % len(_TABLE)


class CheapRunner(FakeRunner):
    """A faster fake model that keeps no record of its steps."""

    def __init__(self, **given):
        super().__init__(**given)
        self.steps = deque(maxlen=1)

    def logits(self, ids):
        return _TABLE[_entry(ids)]


def greedy(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(_LIKELIEST[_entry(ids)])
    return ids[len(prompt) :]


class Crowd:
    """Sends requests from threads that each have an event loop, and records how they end."""

    def __init__(self, engine, seed):
        self.engine = engine
        self.seed = seed
        self.outcomes = Counter()
        self.tokens = 0
        self.wrong = []
        self._lock = threading.Lock()

    def send(self, requests):
        each = [requests // THREADS + (i < requests % THREADS) for i in range(THREADS)]
        threads = [
            threading.Thread(target=lambda i=i: asyncio.run(self._client(i, each[i])), name=f"client-{i}")
            for i in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a request did not end"

    async def _client(self, number, requests):
        rng = random.Random(f"{self.seed} {number}")
        # Four at once.
        gate = asyncio.Semaphore(4)

        async def one(index):
            async with gate:
                await self._request(rng, f"{number}-{index}")

        await asyncio.gather(*(one(index) for index in range(requests)))

    async def _request(self, rng, name):
        stem = rng.randrange(4)
        prompt = [stem + 3 + i % 7 for i in range(rng.randrange(1, 28))] + [rng.randrange(3, 60)] * rng.randrange(3)
        prompt = prompt or [1]
        max_tokens = rng.randrange(1, 16)
        kind = rng.choice(["finish"] * 6 + ["cancel", "cancel", "deadline", "slow"])
        deadline = time.monotonic() + rng.uniform(-0.03, 0.3) if kind == "deadline" else math.inf
        message = request(
            name,
            prompt=prompt,
            deadline=deadline,
            temperature=0,
            max_tokens=max_tokens,
            chunk_tokens=rng.choice([1, 1, 5]),
            cache_salt=rng.choice(["", "tenant"]),
        )
        cancel_after = rng.randrange(3)
        while True:
            try:
                slot = self.engine.submit(message)
                break
            except OverloadedError as error:
                await asyncio.sleep(min(error.retry_after_ms / 1000, 0.02))
        ids, chunks = [], 0
        while True:
            if kind == "cancel" and chunks >= cancel_after:
                slot.cancel()
            if kind == "slow":
                await asyncio.sleep(0.03)
            try:
                chunk = await slot.read()
            except (DeadlineError, OverloadedError, RequestFailedError) as error:
                # A request that cannot meet its deadline is refused before it.
                ended = "cancel" if isinstance(error, RequestFailedError) else "deadline"
                right = kind == ended and ids == greedy(prompt, len(ids))
                break
            ids += chunk.output_ids
            chunks += 1
            if chunk.finish_reason is not None:
                ended = "finish"
                right = ids == greedy(prompt, max_tokens) and chunk.finish_reason == "length"
                break
        with self._lock:
            self.outcomes[ended] += 1
            self.tokens += len(ids)
            if not right:
                self.wrong.append((name, kind, ended, ids))


def test_every_request_of_a_rough_crowd_ends_and_all_blocks_are_free_again():
    process = psutil.Process()
    threads_before = set(threading.enumerate())
    engine = make_engine(CheapRunner(blocks=BLOCKS), max_running=16, max_waiting=160, step_tokens=64)
    try:
        rss = []
        outcomes, tokens = Counter(), 0
        for seed in range(2):
            crowd = Crowd(engine, seed)
            crowd.send(REQUESTS // 2)
            assert crowd.wrong == []
            outcomes += crowd.outcomes
            tokens += crowd.tokens
            engine._runner.calls.clear()
            rss.append(process.memory_info().rss)
            assert engine.load.blocks_in_use == 0
            assert engine._scheduler.sequences == []
    finally:
        engine.close()
    statistics = engine.statistics
    assert outcomes.total() == REQUESTS
    assert min(outcomes[kind] for kind in ("finish", "cancel", "deadline")) > 0
    assert statistics.succeeded == outcomes["finish"]
    assert statistics.cancelled == outcomes["cancel"]
    assert statistics.failed == outcomes["deadline"]
    assert statistics.preempted > 0
    assert statistics.cached_tokens > 0
    assert statistics.tokens >= tokens
    assert statistics.tokens_after_cancel <= statistics.tokens
    assert rss[1] - rss[0] < 30e6
    assert set(threading.enumerate()) <= threads_before
