"""Batches: similar lengths together, oldest first; a culprit fails alone, and cancelled requests do not run."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
)
from headrace_predictor.engine.interface import EngineDeadError
from headrace_predictor.tensor_models.batching import BatchQueue, BatchWorker, Waiting, bucket_of
from tests.waiting import until


class DeviceError(Exception):
    """A fatal error of the device."""


class Doubler:
    """Doubles numbers; the first batch waits at a gate, so that a second one gathers behind it."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Event()

    def __call__(self, items):
        self.batches.append(list(items))
        assert self.gate.wait(30)
        if "bad" in items:
            raise ValueError("secret")
        if "device" in items:
            raise DeviceError
        return [item * 2 for item in items]


@pytest.fixture
def doubler():
    return Doubler()


@pytest.fixture
def worker(doubler):
    made = BatchWorker("m", doubler, max_rows=4, max_delay_s=0.0, max_waiting=4, fatal=(DeviceError,))
    yield made
    doubler.gate.set()
    made.close()


def submit(worker, item, timeout_s=None, rows=1):
    return asyncio.create_task(worker.submit(item, rows, 5, Deadline.after(timeout_s)))


async def gathered(worker, doubler, *items):
    """A running batch, and behind it the tasks of the waiting requests."""
    first = submit(worker, 0)
    await until(lambda: doubler.batches)
    waiting = [submit(worker, item) for item in items]
    await until(lambda: len(worker._queue) == len(items))
    return first, waiting


async def test_waiting_requests_run_as_one_batch_and_each_gets_its_own_result(worker, doubler):
    first, waiting = await gathered(worker, doubler, 1, 2, 3)
    doubler.gate.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4, 6]
    assert doubler.batches == [[0], [1, 2, 3]]
    assert (worker.counts.steps, worker.counts.succeeded) == (2, 4)


async def test_the_requests_of_a_failed_batch_run_again_one_by_one(worker, doubler, caplog):
    _, waiting = await gathered(worker, doubler, 1, "bad", 3)
    doubler.gate.set()
    good, bad, also_good = await asyncio.gather(*waiting, return_exceptions=True)
    assert (good, also_good) == (2, 6)
    assert isinstance(bad, RequestFailedError)
    assert "secret" not in bad.message
    assert doubler.batches == [[0], [1, "bad", 3], [1], ["bad"], [3]]
    assert (worker.counts.succeeded, worker.counts.failed) == (3, 1)


async def test_a_request_that_is_cancelled_in_the_queue_does_not_run(worker, doubler):
    first, (stays, leaves) = await gathered(worker, doubler, 1, 2)
    leaves.cancel()
    await until(leaves.done)
    doubler.gate.set()
    assert await asyncio.gather(first, stays) == [0, 2]
    assert doubler.batches == [[0], [1]]
    assert worker.counts.cancelled == 1


async def test_a_request_that_is_cancelled_while_it_runs_counts_as_cancelled(worker, doubler):
    first, _ = await gathered(worker, doubler)
    first.cancel()
    await until(first.done)
    doubler.gate.set()
    assert await submit(worker, 4) == 8
    assert (worker.counts.cancelled, worker.counts.succeeded) == (1, 1)


async def test_a_request_past_its_deadline_does_not_run(worker, doubler):
    first, _ = await gathered(worker, doubler)
    late = submit(worker, 1, timeout_s=0.0)
    await until(lambda: len(worker._queue) == 1)
    doubler.gate.set()
    with pytest.raises(DeadlineError):
        await late
    assert await first == 0
    assert doubler.batches == [[0]]


async def test_a_full_queue_and_a_batch_too_large_are_refused(worker, doubler):
    first, waiting = await gathered(worker, doubler, 1, 2, 3, 4)
    with pytest.raises(OverloadedError):
        await submit(worker, 5)
    with pytest.raises(InvalidRequestError):
        await submit(worker, 6, rows=5)
    doubler.gate.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4, 6, 8]


async def test_a_stop_ends_waiting_requests(worker, doubler):
    first, waiting = await gathered(worker, doubler, 1, 2)
    stop = asyncio.create_task(asyncio.to_thread(worker.close))
    await until(lambda: worker._stopping)
    doubler.gate.set()
    await stop
    assert await first == 0
    assert all(isinstance(error, NotReadyError) for error in await asyncio.gather(*waiting, return_exceptions=True))
    with pytest.raises(NotReadyError):
        await submit(worker, 1)


@pytest.mark.parametrize("items", [["device"], [1, "device", 2], ["bad", "device", 2]])
async def test_a_device_error_ends_the_model_and_all_its_requests(worker, doubler, items, caplog):
    _, waiting = await gathered(worker, doubler, *items)
    doubler.gate.set()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(worker.died(), 20)
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
    assert all(isinstance(error, (HopBrokenError, NotReadyError, RequestFailedError)) for error in errors)
    # One of the requests that ran is to blame; a retry elsewhere must count that.
    assert isinstance(errors[items.index("device")], HopBrokenError)


async def test_a_batch_that_never_ends_ends_the_model_and_all_its_requests(doubler):
    worker = BatchWorker("m", doubler, max_rows=4, max_delay_s=0.0, max_waiting=4, timeout_s=0.5)
    try:
        running, [waiting] = await gathered(worker, doubler, 2)
        dies = asyncio.create_task(worker.died())
        with pytest.raises(HopBrokenError):
            await asyncio.wait_for(running, 30)
        with pytest.raises(NotReadyError):
            await waiting
        with pytest.raises(EngineDeadError):
            await dies
        with pytest.raises(NotReadyError):
            await submit(worker, 3)
    finally:
        doubler.gate.set()
        worker.close()


def queue(*entries, max_rows=4, max_delay_s=1.0, max_waiting=100):
    """A queue of entries (rows, length, since)."""
    made = BatchQueue(max_rows, max_delay_s, max_waiting)
    for number, (rows, length, since) in enumerate(entries):
        made.add(Waiting(number, rows, length, since), 1)
    return made


def numbers(batch):
    return [entry.item for entry in batch]


def test_a_request_waits_for_others_no_longer_than_the_delay():
    waiting = queue((1, 5, 0.0), (1, 7, 0.5))
    assert waiting.take_batch(0.9) == []
    assert waiting.due_at() == 1.0
    assert numbers(waiting.take_batch(1.0)) == [0, 1]
    assert waiting.due_at() is None


def test_a_bucket_holds_lengths_within_a_factor_of_two():
    assert [bucket_of(length) for length in (1, 16, 17, 32, 33, 513)] == [16, 16, 32, 32, 64, 1024]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 600), st.floats(0, 10)), max_size=60), st.integers(8, 16))
def test_a_batch_is_the_oldest_request_and_the_next_ones_of_its_bucket_that_fit(requests, max_rows):
    requests = sorted(requests, key=lambda entry: entry[2])
    waiting, left = queue(*requests, max_rows=max_rows, max_delay_s=0.5), dict(enumerate(requests))
    while left:
        batch = waiting.take_batch(20.0)
        assert batch[0].since == left[min(left)][2]
        of_bucket = [number for number, entry in left.items() if bucket_of(entry[1]) == bucket_of(batch[0].length)]
        # In order, though a later one might fit: a large request must not wait for ever.
        assert numbers(batch) == of_bucket[: len(batch)]
        rows = [left[number][0] for number in of_bucket[: len(batch) + 1]]
        assert sum(rows[: len(batch)]) <= max_rows
        assert len(batch) == len(of_bucket) or sum(rows) > max_rows
        for number in numbers(batch):
            del left[number]
    assert waiting.due_at() is None
