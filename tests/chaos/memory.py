"""The growth of memory of a stack's processes, for each life of a process separately."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

import psutil

from tests.support.runner_stack import Stack

# Small caches of a predictor, full once it is warm: keys and values, and those of oneDNN and torch for compiled
# shapes. With their usual sizes they grow for thousands of streams.
SMALL_CACHES = {"PREDICTOR_KV_CACHE_MEMORY": "16MiB", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "LRU_CACHE_CAPACITY": "1"}
# Other allowed growth of a process, in bytes: the logger's database fills its cache of pages.
CACHES = {"logger": 64 << 20}
_EVERY_S = 1.0
_WARM_UP = 30  # Samples at the beginning of a life, while it loads and allocators fill their pools.
_LONG_LIFE = 60  # Samples after that; fewer do not show growth.


def resident_bytes(stack: Stack) -> dict[str, int]:
    """The resident bytes of each running process and its children, such as engines."""
    found = {}
    for name in stack.names:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            process = psutil.Process(stack.pid(name))
            found[name] = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    return found


@asynccontextmanager
async def peaks(stack: Stack, every_s: float = 0.2) -> AsyncIterator[dict[str, int]]:
    """The peak of each process; complete at the end of the block."""
    most = resident_bytes(stack)

    async def look() -> None:
        while True:
            await asyncio.sleep(every_s)
            for name, size in resident_bytes(stack).items():
                most[name] = max(size, most.get(name, 0))

    looking = asyncio.create_task(look(), name="memory peaks")
    try:
        yield most
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


class MemoryWatch:
    """Samples memory once a second; an async context manager."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._samples: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._task: asyncio.Task[None] | None = None

    def growth_mb(self) -> dict[str, float]:
        """The most that a life of each process grew by, from the first half of its warm part to the second."""
        most: dict[str, float] = {}
        for (name, _), samples in self._samples.items():
            warm = samples[_WARM_UP:]
            if len(warm) >= _LONG_LIFE:
                half = len(warm) // 2
                growth = (max(warm[half:]) - max(warm[:half])) / 1e6
                most[name] = max(most.get(name, 0.0), round(growth, 1))
        return most

    async def _watch(self) -> None:
        while True:
            for name, size in resident_bytes(self._stack).items():
                with suppress(ProcessLookupError):
                    self._samples[name, self._stack.pid(name)].append(size)
            await asyncio.sleep(_EVERY_S)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name="memory watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
