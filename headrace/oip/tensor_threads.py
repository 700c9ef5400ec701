"""A thread that decodes tensors with many elements, so that the event loop is not blocked.

Small tensors are decoded inline, because a change of threads costs more. The bound on requests in flight bounds this
queue too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.deadline import Deadline
from headrace.oip.tensors import BYTES, MAX_BYTES_ELEMENTS

_FIXED = ("fp32_contents", "fp64_contents")  # Numbers of fixed size, which are decoded together.
_AT_ONCE = 4096  # Elements that take 2 ms.
_decoders = ThreadPoolExecutor(1, thread_name_prefix="decode-tensors")

T = TypeVar("T")


async def decoding(described: Iterable[Any], decode: Callable[[], T], deadline: Deadline) -> T:
    """The result of `decode`, which decodes these inputs or outputs; cancelled, it runs to its end.

    Raises DeadlineError if the deadline passes before.
    """
    if elements_by_one(described) <= _AT_ONCE:
        return decode()
    async with deadline.scope():
        return await asyncio.get_running_loop().run_in_executor(_decoders, decode)


def elements_by_one(described: Iterable[Any]) -> int:
    """How many elements of inputs or outputs are decoded one by one, at some 0.5 µs each; others take no time."""
    count = 0
    for description in described:
        if description.datatype == BYTES:
            size = math.prod(map(abs, description.shape[:32]))
            count += size if size <= MAX_BYTES_ELEMENTS else 0  # More are refused without decoding.
        elif description.HasField("contents"):
            count += sum(len(values) for field, values in description.contents.ListFields() if field.name not in _FIXED)
    return count
