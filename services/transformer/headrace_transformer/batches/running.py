"""Runs one batch, whose lock this process holds: check the file, answer its lines, close.

Every step can be repeated, so that another process goes on wherever this one ends: lines with a result are left out,
the others run. A line that fails because something is busy or away runs again, with backoff, until the batch expires.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

from opentelemetry import metrics

from headrace.clients import client_of
from headrace.deadline import Deadline
from headrace.errors import (
    ForbiddenError,
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.batches.line_calls import Method, answer_line, metadata_of
from headrace_transformer.batches.lines import CheckedLines, Line, check_lines, check_stored, read_lines
from headrace_transformer.batches.objects import Batch, LineError, Result, Status
from headrace_transformer.batches.store import Store
from headrace_transformer.processes.body_processes import LARGE_BODIES, SMALL_BYTES, BodyProcesses

logger = logging.getLogger(__name__)

_REPEATED = OverloadedError, NotReadyError, HopBrokenError
_OUTCOME = "headrace.outcome"
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
_UNWRITTEN = 64  # Results that wait for the disk; beyond these, lines wait.
_WRITE_EVERY_S = 0.05
_CLOSED_AT_ONCE = 1000  # Lines that get an error in one transaction.
_DISK_DELAY_S = 5.0  # After a failed write.
_LAST_TRIES = 12  # Of writes, after the last line.
_CANCEL_POLL_S = 1.0
_MODEL_WAIT_S = 5.0
_EXPIRED = {"code": "batch_expired", "message": "the request was not answered before the completion window ended"}
_CANCELLED = {"code": "batch_cancelled", "message": "the batch was cancelled before the request was answered"}

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Resources:
    """What all batches of a process share; of their lines `concurrency` are answered at once, each in a slot."""

    store: Store
    bodies: BodyProcesses
    methods: Mapping[str, Method]
    find_model: Callable[[str, str, CallContext], Awaitable[object]]  # Router.wait_for.
    concurrency: int

    @cached_property
    def slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.concurrency)

    @cached_property
    def requests(self) -> metrics.Counter:
        description = "Requests of batches, by outcome; repeated ones run again."
        return metrics.get_meter("headrace").create_counter("headrace.batch.requests", "{request}", description)


class RunningBatch:
    """Owned by the event loop; `run` returns when the batch is final, and may be cancelled at any time.

    What blocks runs in `thread`, which is one and the batch's own: a cancellation does not end its work, so the lock
    is released there too.
    """

    def __init__(self, shared: Resources, batch: Batch, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._shared = shared
        self._batch = batch
        self._unwritten: asyncio.Queue[Result] = asyncio.Queue(_UNWRITTEN)
        self._unsent: list[Result] = []  # Taken from the queue.
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        if self._batch.status == "validating" and not await self._validated():
            return
        if self._batch.closing_as is None:
            lines = await self._in_thread(self._lines_left)
            closing_as = await self._answer_lines(lines)
            self._batch = self._batch.entered("finalizing", time.time(), closing_as=closing_as)
            await self._in_thread(self._shared.store.save, self._batch)
        await self._in_thread(self._close, self._batch.closing_as)

    # ------------------------------------------------------------------ validation

    async def _validated(self) -> bool:
        checked = await self._checked()
        errors = checked.errors or tuple([error async for error in self._model_errors(checked.models)])
        now = time.time()
        if errors:
            self._batch = self._batch.entered("failed", now, errors=errors)
            await self._in_thread(self._shared.store.finish, self._batch)
            return False
        self._batch = self._batch.entered("in_progress", now, total=checked.total)
        await self._in_thread(self._shared.store.save, self._batch)
        return True

    async def _checked(self) -> CheckedLines:
        """The file's lines, checked in a process of bodies if it is large."""
        store, file_id, endpoint = self._shared.store, self._batch.input_file_id, self._batch.endpoint
        try:
            size = await self._in_thread(store.size, file_id)
            if size <= SMALL_BYTES:
                return await self._in_thread(lambda: check_lines(store.pieces(file_id), endpoint))
            arguments = store, file_id, endpoint
            checked, _ = await self._shared.bodies.run(check_stored, arguments, b"", lane=LARGE_BODIES)
            return checked
        except HeadraceError as error:
            if isinstance(error, OverloadedError):
                raise
            return CheckedLines(0, (LineError(code="unreadable_file", message=str(error)),), {})

    async def _model_errors(self, models: dict[str, int]) -> AsyncIterator[LineError]:
        """The models that the client cannot use; one that is not ready now may be later."""
        for model, line in models.items():
            call = CallContext("batch", self._batch.id, metadata_of(self._batch), Deadline.after(_MODEL_WAIT_S))
            try:
                if model:
                    client_of(call.metadata).check_model(model)
                    await self._shared.find_model(model, "", call)
            except (NotFoundError, ForbiddenError, InvalidRequestError) as error:
                code = "model_not_allowed" if isinstance(error, ForbiddenError) else "model_not_found"
                yield LineError(code=code, message=error.message, param="body.model", line=line)
            except HeadraceError:
                continue

    # ------------------------------------------------------------------ lines

    def _lines_left(self) -> Iterator[Line]:
        store = self._shared.store
        return read_lines(store.pieces(self._batch.input_file_id), store.done(self._batch))

    async def _answer_lines(self, lines: Iterator[Line]) -> Status:
        """Answers all lines, or until the batch is cancelled or expires; the state in which it then ends."""
        names = (f"{self._batch.id}-{number}" for number in range(self._shared.concurrency))
        workers = [asyncio.create_task(self._work(lines), name=name) for name in names]
        answered = asyncio.gather(*workers)
        writing = asyncio.create_task(self._write(), name=f"{self._batch.id}-results")
        cancelled = asyncio.create_task(self._cancel_requested(), name=f"{self._batch.id}-cancel")
        try:
            left_s = max(0.0, self._batch.expires_at - time.time())
            ended, _ = await asyncio.wait(
                (answered, writing, cancelled), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()
            status: Status = "expired"
            if ended:
                status = "completed" if answered in ended else "cancelled"
        finally:
            for task in (*workers, cancelled):
                task.cancel()
            await asyncio.gather(answered, cancelled, return_exceptions=True)
            writing.cancel()  # Then it writes what is there.
            await asyncio.gather(writing, return_exceptions=True)
        for _ in range(_LAST_TRIES):
            if not self._unsent:
                return status
            await asyncio.sleep(_DISK_DELAY_S)
            await self._written()
        raise OSError("results could not be written")

    async def _work(self, lines: Iterator[Line]) -> None:
        while True:
            async with self._reading:
                line = await self._in_thread(next, lines, None)
            if line is None:
                return
            await self._unwritten.put(await self._answered(line))

    async def _answered(self, line: Line) -> Result:
        """The result of a line, which waits for a slot, and tries again."""
        method, delay_s = self._shared.methods[self._batch.endpoint], _FIRST_DELAY_S
        while True:
            async with self._shared.slots:
                # In a task of its own: the request's id and trace are the task's.
                work = answer_line(method, self._batch, line)
                result, error = await asyncio.create_task(work, name="batch line")
            if not isinstance(error, _REPEATED):
                self._count("failed" if result.is_error else "completed")
                return result
            self._count("repeated")
            wait_s = max(delay_s, (error.retry_after_ms or 0) / 1000)
            await asyncio.sleep(min(wait_s, _MAX_DELAY_S) * random.uniform(0.75, 1.25))  # noqa: S311
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _count(self, outcome: str) -> None:
        self._shared.requests.add(1, {_OUTCOME: outcome})

    async def _cancel_requested(self) -> None:
        while True:
            with suppress(OverloadedError):  # The disk; the next look may see it.
                if await self._in_thread(self._shared.store.is_cancelled, self._batch):
                    return
            await asyncio.sleep(_CANCEL_POLL_S)

    # ------------------------------------------------------------------ results

    async def _write(self) -> None:
        """Writes results as they come; when it is cancelled, those that wait."""
        try:
            while True:
                self._unsent.append(await self._unwritten.get())
                await asyncio.sleep(_WRITE_EVERY_S)
                if not await self._written():
                    await asyncio.sleep(_DISK_DELAY_S)
        finally:
            await self._written()

    async def _written(self) -> bool:
        """Whether the disk has taken all results."""
        while not self._unwritten.empty():
            self._unsent.append(self._unwritten.get_nowait())
        try:
            await self._in_thread(self._append)
        except OverloadedError:
            logger.exception("results of %s could not be written; trying again", self._batch.id)
            return False
        return True

    def _append(self) -> None:
        results = tuple(self._unsent)  # More may come meanwhile.
        self._save(results)
        del self._unsent[: len(results)]

    def _save(self, results: Sequence[Result]) -> None:
        batch = self._batch.with_results(results)
        self._shared.store.save(batch, results)
        self._batch = batch

    def _close(self, closing_as: Status | None) -> None:
        """Gives the lines without a result an error, and makes the batch final."""
        if closing_as != "completed":
            error = _CANCELLED if closing_as == "cancelled" else _EXPIRED
            left = self._lines_left()
            while lines := list(islice(left, _CLOSED_AT_ONCE)):
                ids = [(line.number, line.custom_id, f"{self._batch.id}/{line.custom_id}") for line in lines]
                self._save([Result(*of, error=error) for of in ids])
        self._shared.store.finish(self._batch.entered(closing_as or "completed", time.time()))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
