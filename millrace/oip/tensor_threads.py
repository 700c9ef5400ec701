"""A thread that decodes tensors with many elements, so that the event loop is not blocked.

Small tensors are decoded inline, because a change of threads costs more. The bound on requests in flight bounds this
queue too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millrace.oip.tensors import elements_by_one

_AT_ONCE = 4096  # Elements that take 2 ms.
_decoders = ThreadPoolExecutor(1, thread_name_prefix="decode-tensors")

T = TypeVar("T")


async def decoding(described: Iterable[Any], decode: Callable[[], T]) -> T:
    """The result of `decode`, which decodes these inputs or outputs; cancelled, it runs to its end."""
    if elements_by_one(described) <= _AT_ONCE:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(_decoders, decode)
