"""Large bodies are read beside the event loop, so many bytes at a time at most, and no longer than the deadline."""

import asyncio
import threading

import pytest

from millrace.errors import DeadlineError, InvalidRequestError, OverloadedError
from services.transformer.v2_rest.body_threads import SMALL_BYTES, BodyThreads

LARGE = SMALL_BYTES + 1


@pytest.fixture
async def threads():
    made = BodyThreads(threads=1, max_bytes=3 * LARGE)
    yield made
    await made.close()


async def test_small_bodies_are_read_at_once_and_large_ones_on_a_thread(threads):
    assert await threads.run(SMALL_BYTES, threading.get_ident) == threading.get_ident()
    assert await threads.run(LARGE, threading.get_ident) != threading.get_ident()


async def test_what_the_work_raises_comes_back(threads):
    def refuse():
        raise InvalidRequestError("no")

    for size in (0, LARGE):
        with pytest.raises(InvalidRequestError, match="no"):
            await threads.run(size, refuse)


async def test_bytes_beyond_the_bound_are_refused_until_there_is_room(threads):
    gate = threading.Event()
    try:
        waiting = [asyncio.create_task(threads.run(LARGE, gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await threads.run(LARGE, gate.wait)
        assert caught.value.retry_after_ms
        # Who leaves the queue makes room.
        waiting[-1].cancel()
        await asyncio.gather(waiting[-1], return_exceptions=True)
        waiting[-1] = asyncio.create_task(threads.run(LARGE, gate.wait))
        await asyncio.sleep(0)
    finally:
        gate.set()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await threads.run(3 * LARGE, lambda: "room") == "room"


async def test_a_wait_ends_with_the_deadline(threads):
    gate = threading.Event()
    try:
        with pytest.raises(DeadlineError):
            await threads.run(LARGE, gate.wait, 0.01)
    finally:
        gate.set()
