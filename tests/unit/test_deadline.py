"""A deadline: the time left, whether it has passed, and a scope that ends a wait beyond it."""

import pytest

from headrace.deadline import Deadline
from headrace.errors import DeadlineError


def test_a_margin_counts_as_passed():
    deadline = Deadline.after(30.0)
    assert not deadline.passed()
    assert deadline.passed(margin_s=31.0)
    assert Deadline.after(0.0).passed()


async def test_a_scope_whose_deadline_has_passed_is_not_entered():
    with pytest.raises(DeadlineError):
        async with Deadline.after(-1.0).scope():
            pytest.fail("entered")


async def test_a_timeout_error_of_the_block_itself_is_passed_on():
    with pytest.raises(TimeoutError):
        async with Deadline.after(60.0).scope():
            raise TimeoutError
