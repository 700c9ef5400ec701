"""Replays the streams of a source at a target, a few at a time.

One task reads records and queues those that can be replayed; `concurrency` workers replay and compare them. The queue
is as long as there are workers, so that records are read no faster than they are replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_runner.replay.comparison import Difference, compare
from headrace_runner.replay.results import Results
from headrace_runner.replay.selection import LoggedStream, select
from headrace_runner.replay.target import FailedError, Target

Found = Callable[[LoggedStream, "Difference | FailedError"], None]


class Replay:
    """One run; `limit` is the most streams that it replays, `found` is called with each difference and each failure."""

    def __init__(self, target: Target, *, concurrency: int, limit: int, from_text: bool, found: Found) -> None:
        self.results = Results()
        self._target = target
        self._concurrency = concurrency
        self._limit = limit
        self._from_text = from_text
        self._found = found
        self._queue: asyncio.Queue[LoggedStream | None] = asyncio.Queue(concurrency)

    async def run(self, records: AsyncGenerator[PayloadRecord, None]) -> Results:
        """Reads and replays all records, and closes `records`; raises what reading them raises."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._concurrency):
                    tasks.create_task(self._work(), name=f"replay {number}")
                tasks.create_task(self._read_all(records), name="read records")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for model in self.results.fingerprints():
            self.results.weights[model] = await self._target.fingerprint(model)
        return self.results

    async def _read_all(self, records: AsyncGenerator[PayloadRecord, None]) -> None:
        async with aclosing(records):
            await self._read(records)
        for _ in range(self._concurrency):
            await self._queue.put(None)

    async def _read(self, records: AsyncGenerator[PayloadRecord, None]) -> None:
        results, selected = self.results, 0
        async for record in records:
            stream = select(record, self._from_text)
            if isinstance(stream, str):
                results.not_comparable[stream] += 1
                continue
            if selected == self._limit:
                results.limit_reached = True
                return
            selected += 1
            results.add_weights(stream)
            await self._queue.put(stream)

    async def _work(self) -> None:
        while (stream := await self._queue.get()) is not None:
            try:
                answer = await self._target.generate(stream.request)
            except FailedError as failure:
                self.results.add_failure(stream, failure.status, str(failure))
                self._found(stream, failure)
                continue
            difference = compare(stream, answer)
            self.results.add(stream, answer, difference)
            if difference is not None:
                self._found(stream, difference)
