"""Which requests make a batch: similar lengths together, oldest first, when it is full or the delay is over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError, OverloadedError
from headrace_predictor.tensor_models.batching import BatchQueue, Waiting, bucket_of


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


def test_a_full_batch_runs_at_once():
    waiting = queue((2, 5, 0.0), (2, 7, 0.0), (1, 6, 0.0))
    assert waiting.due_at() == 0.0
    assert numbers(waiting.take_batch(0.0)) == [0, 1]
    assert waiting.take_batch(0.0) == []
    assert numbers(waiting.take_batch(1.0)) == [2]


def test_requests_of_different_lengths_run_apart_oldest_first():
    waiting = queue((1, 500, 0.1), (1, 5, 0.0), (1, 400, 0.2), (1, 16, 0.3))
    assert numbers(waiting.take_batch(5.0)) == [1, 3]
    assert numbers(waiting.take_batch(5.0)) == [0, 2]
    assert len(waiting) == 0


def test_a_batch_keeps_the_order_of_its_bucket():
    waiting = queue((3, 5, 0.0), (2, 5, 0.1), (1, 5, 0.2))
    # Not the first and the third, though they would fit: a large request must not wait for ever.
    assert numbers(waiting.take_batch(5.0)) == [0]
    assert numbers(waiting.take_batch(5.0)) == [1, 2]


def test_cancelled_and_expired_requests_do_not_run():
    waiting = BatchQueue(4, 1.0, 100)
    entries = [Waiting(number, 1, 5, 0.0, deadline) for number, deadline in enumerate([None, 0.5, 2.0])]
    for entry in entries:
        waiting.add(entry, 1)
    assert waiting.remove(entries[0])
    assert not waiting.remove(entries[0])
    assert numbers(waiting.take_expired(0.5)) == [1]
    assert numbers(waiting.take_batch(1.0)) == [2]


def test_requests_beyond_the_queue_or_larger_than_a_batch_are_refused():
    waiting = queue((1, 5, 0.0), max_waiting=1)
    with pytest.raises(OverloadedError) as refused:
        waiting.add(Waiting(1, 1, 5, 0.0), 70)
    assert refused.value.retry_after_ms == 70
    with pytest.raises(InvalidRequestError, match="a batch of 5, at most 4 are allowed"):
        waiting.add(Waiting(2, 5, 5, 0.0), 1)


def test_a_bucket_holds_lengths_within_a_factor_of_two():
    assert [bucket_of(length) for length in (1, 16, 17, 32, 33, 513)] == [16, 16, 32, 32, 64, 1024]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 600), st.floats(0, 10)), max_size=60),
    st.integers(8, 16),
)
def test_every_request_runs_once_in_batches_that_fit(requests, max_rows):
    waiting = queue(*sorted(requests, key=lambda entry: entry[2]), max_rows=max_rows, max_delay_s=0.5)
    ran = []
    while (due_at := waiting.due_at()) is not None:
        batch = waiting.take_batch(due_at)
        assert batch
        assert sum(entry.rows for entry in batch) <= max_rows
        assert len({bucket_of(entry.length) for entry in batch}) == 1
        ran += numbers(batch)
    assert sorted(ran) == list(range(len(requests)))
