"""A wait that fails says what it last saw."""

from __future__ import annotations

from functools import partial

import pytest

from tests.waiting import until


async def failure(condition: object) -> str:
    with pytest.raises(AssertionError) as failed:
        await until(condition, timeout_s=0)  # type: ignore[arg-type]
    return str(failed.value)


async def test_a_wait_that_fails_shows_its_condition_the_last_value_and_the_variables() -> None:
    rows = ["first", "x" * 1000]
    text = await failure(lambda: len(rows) - 2)
    assert "lambda: len(rows) - 2" in text
    assert "last value: 0" in text
    assert "rows = ['first', 'xxx" in text
    assert len(text) < 1200


async def test_a_coroutine_and_a_condition_without_source_have_their_last_value() -> None:
    async def empty() -> list[int]:
        return []

    assert "last value: []" in await failure(empty)
    assert "last value: ''" in await failure(partial(str, ""))
