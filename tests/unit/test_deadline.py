"""A deadline: the time left, whether it has passed, and a scope that ends a wait beyond it."""

import asyncio
import time

import pytest

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import DeadlineError


def test_no_deadline_leaves_any_time():
    assert Deadline.after(None) == NO_DEADLINE
    assert NO_DEADLINE.left() is None
    assert not NO_DEADLINE.passed(1e9)


def test_the_time_left_shrinks_until_it_raises():
    assert 29 < Deadline.after(30.0).left() <= 30
    with pytest.raises(DeadlineError, match="too late for the body"):
        Deadline(time.monotonic() - 1).left("too late for the body")


def test_a_margin_counts_as_passed():
    deadline = Deadline.after(30.0)
    assert not deadline.passed()
    assert deadline.passed(margin_s=31.0)
    assert Deadline.after(0.0).passed()


async def test_a_scope_ends_a_wait_beyond_the_deadline():
    with pytest.raises(DeadlineError, match="the deadline passed"):
        async with Deadline.after(0.01).scope():
            await asyncio.sleep(60)


async def test_a_scope_whose_deadline_has_passed_is_not_entered():
    with pytest.raises(DeadlineError):
        async with Deadline.after(-1.0).scope():
            pytest.fail("entered")


async def test_a_timeout_error_of_the_block_itself_is_passed_on():
    with pytest.raises(TimeoutError):
        async with Deadline.after(60.0).scope():
            raise TimeoutError
