"""Waits for conditions, never for time: limits here only end a test that hangs, on the slowest machine too."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

HANG_S = 180.0
_MAX_CHARS = 500


async def until(
    condition: Callable[[], object | Awaitable[object]],
    timeout_s: float = HANG_S,
    *,
    holds: Callable[[Any], object] = bool,
) -> Any:
    """Returns `condition()`, which may be a coroutine, once it holds, by `holds`; fails the test after `timeout_s`.

    The failure has the condition's source, its last value and the variables that it reads.
    """
    deadline = time.monotonic() + timeout_s
    delay_s = 0.005
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if holds(value):
            return value
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s: {_description(condition, value)}"
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 1.2, 0.1)  # Each check of a process costs it time.


def _description(condition: Callable[[], object], value: object) -> str:
    try:
        source = inspect.getsource(condition).strip()
    except Exception:  # A partial or a bound method of a class has none.
        source = _short(condition)
    try:
        variables = inspect.getclosurevars(condition).nonlocals
    except Exception:
        variables = {}
    lines = (f"  {name} = {_short(variable)}" for name, variable in variables.items())
    return "\n".join((source[:_MAX_CHARS], f"  last value: {_short(value)}", *lines))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"{type(value).__name__} whose repr raises {error!r}"
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}…"
