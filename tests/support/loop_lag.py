"""How long the event loop is blocked while a block runs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoopLag:
    """`longest_s` is the longest iteration so far, in CPU seconds of this process: other load does not count."""

    longest_s = 0.0

    async def _watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.process_time() - before)


@asynccontextmanager
async def loop_lag() -> AsyncIterator[LoopLag]:
    """Measures the iterations of the running loop until the block ends."""
    lag = LoopLag()
    watching = asyncio.create_task(lag._watch(), name="loop lag")
    try:
        yield lag
    finally:
        watching.cancel()
