"""Requests in flight take so many bytes together; one more is refused at once, or waits for its turn."""

import asyncio

import pytest

from headrace.errors import OverloadedError, TooLargeError
from headrace.rpc.limits import byte_budget
from headrace.rpc.limits.byte_budget import ByteBudget
from tests.waiting import until


async def test_a_request_beyond_the_whole_budget_is_too_large_and_one_beyond_the_free_part_may_retry():
    budget = ByteBudget(100)
    with pytest.raises(TooLargeError):
        budget.reserve(101)
    with pytest.raises(TooLargeError):
        await budget.reserve_in_turn(101)
    budget.reserve(60)
    with pytest.raises(OverloadedError) as refused:
        budget.reserve(41)
    assert refused.value.retry_after_ms
    budget.reserve(40)
    budget.release(60)
    budget.reserve(60)
    assert budget.in_use == 100


async def test_waiting_requests_are_bounded_and_served_in_order():
    budget, order = ByteBudget(100), []

    async def wait(size, name):
        await budget.reserve_in_turn(size)
        order.append(name)

    budget.reserve(100)
    first = asyncio.create_task(wait(20, "first"))
    second = asyncio.create_task(wait(5, "second"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await budget.reserve_in_turn(1)
    budget.release(10)
    await asyncio.sleep(0)
    assert order == []
    budget.release(15)
    await asyncio.gather(first, second)
    assert (order, budget.in_use) == (["first", "second"], 100)


async def test_a_cancelled_waiter_leaves_its_turn_and_its_bytes_to_others():
    budget = ByteBudget(100)
    budget.reserve(100)
    waits = [asyncio.create_task(budget.reserve_in_turn(20)) for _ in range(1)]
    await asyncio.sleep(0)
    behind = asyncio.create_task(budget.reserve_in_turn(5))
    await asyncio.sleep(0)
    budget.release(20)  # Its turn comes, and it is cancelled before it runs.
    waits[0].cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await behind
    assert budget.in_use == 85


async def test_memory_goes_back_once_large_requests_have_stopped(monkeypatch):
    given_back, loop = [], asyncio.get_running_loop()
    monkeypatch.setattr(byte_budget, "give_memory_back", lambda: given_back.append(True))
    now = loop.time()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now)

        async def after(seconds):
            nonlocal now
            now += seconds
            for _ in range(3):  # What is due then runs.
                await asyncio.sleep(0)

        budget, size = ByteBudget(1 << 30), 16 << 20
        for _ in range(70):
            budget.reserve(size)
            budget.release(size)
            await after(0.7 * byte_budget._TRIM_DELAY_S)
        assert not given_back
        await after(byte_budget._TRIM_DELAY_S)
        for _ in range(3):
            await after(byte_budget._TRIM_DELAY_S)
    await until(lambda: given_back)
    assert len(given_back) == 1
