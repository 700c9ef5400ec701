"""Runs one batch, whose lock this process holds: check the file, answer its lines, close.

Every step can be repeated, so that another process goes on wherever this one ends: lines with a result are left out,
the others run. A line that fails because something is busy or away runs again, with backoff, until the batch expires.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

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
from headrace_transformer.batches.lines import CheckedLines, Line, LineReader, check_lines
from headrace_transformer.batches.objects import Batch, LineError, Status
from headrace_transformer.batches.results import Result, ResultFile
from headrace_transformer.batches.store import Store
from headrace_transformer.processes.body_processes import LARGE_BODIES, SMALL_BYTES, BodyProcesses

logger = logging.getLogger(__name__)

_REPEATED = OverloadedError, NotReadyError, HopBrokenError
_OUTCOME = "headrace.outcome"
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
_UNWRITTEN = 64  # Results that wait for the disk; beyond these, lines wait.
_WRITE_EVERY_S, _SAVE_EVERY_S = 0.05, 1.0
_DISK_DELAY_S = 5.0  # After a failed write.
_CANCEL_POLL_S = 1.0
_MODEL_WAIT_S = 5.0
_EXPIRED = {"code": "batch_expired", "message": "the request was not answered before the completion window ended"}
_CANCELLED = {"code": "batch_cancelled", "message": "the batch was cancelled before the request was answered"}

T = TypeVar("T")


class FindModel(Protocol):
    """As Router.wait_for."""

    def __call__(self, name: str, version: str, call: CallContext) -> Awaitable[object]: ...


class Resources(NamedTuple):
    """What all batches of a process share; `slots` bounds the lines that are answered at once."""

    store: Store
    bodies: BodyProcesses
    methods: Mapping[str, Method]
    find_model: FindModel
    slots: asyncio.Semaphore
    concurrency: int
    requests: metrics.Counter


def count_requests() -> metrics.Counter:
    """The counter of the requests of batches."""
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
        self._output = ResultFile(shared.store.results(batch, batch.output_file_id))
        self._errors = ResultFile(shared.store.results(batch, batch.error_file_id))
        self._unwritten: asyncio.Queue[tuple[Line, Result]] = asyncio.Queue(_UNWRITTEN)
        self._unsent: dict[bool, list[bytes]] = {False: [], True: []}  # Taken from the queue; by `is_error`.
        self._lines: deque[Line] = deque()
        self._reading = asyncio.Lock()
        self._reader: LineReader | None = None
        self._saved_at = 0.0

    async def run(self) -> None:
        if self._batch.status == "validating" and not await self._validated():
            return
        if self._batch.closing_as is None:
            done = await self._in_thread(self._recover)
            self._reader = await self._in_thread(LineReader, self._shared.store.input(self._batch), done)
            try:
                closing_as = await self._answer_lines()
            finally:
                self._reader.close()
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
        path = self._shared.store.input(self._batch)
        arguments = str(path), self._batch.endpoint
        try:
            size = (await self._in_thread(path.stat)).st_size
            if size <= SMALL_BYTES:
                return (await self._in_thread(check_lines, b"", *arguments))[0]
            checked, _ = await self._shared.bodies.run(check_lines, arguments, b"", lane=LARGE_BODIES)
            return checked
        except (FileNotFoundError, HeadraceError) as error:
            if isinstance(error, OverloadedError):
                raise
            message = "the file is gone" if isinstance(error, FileNotFoundError) else str(error)
            return CheckedLines(0, (LineError(code="unreadable_file", message=message),), {})

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

    async def _answer_lines(self) -> Status:
        """Answers all lines, or until the batch is cancelled or expires; the state in which it then ends."""
        names = (f"{self._batch.id}-{number}" for number in range(self._shared.concurrency))
        workers = [asyncio.create_task(self._work(), name=name) for name in names]
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
        if any(self._unsent.values()):
            raise OSError("results could not be written")
        return status

    async def _work(self) -> None:
        while (line := await self._next()) is not None:
            result = await self._answered(line)
            await self._unwritten.put((line, result))

    async def _next(self) -> Line | None:
        async with self._reading:
            if not self._lines and self._reader is not None:
                self._lines.extend(await self._in_thread(self._reader.next))
            return self._lines.popleft() if self._lines else None

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
            if await self._in_thread(self._shared.store.is_cancelled, self._batch):
                return
            await asyncio.sleep(_CANCEL_POLL_S)

    # ------------------------------------------------------------------ results

    def _recover(self) -> set[str]:
        return self._output.recover() | self._errors.recover()

    async def _write(self) -> None:
        """Writes results as they come; when it is cancelled, those that wait."""
        try:
            while True:
                self._take(*await self._unwritten.get())
                await asyncio.sleep(_WRITE_EVERY_S)
                self._take_all()
                if not await self._written():
                    await asyncio.sleep(_DISK_DELAY_S)
        finally:
            self._take_all()
            await self._written()

    def _take(self, line: Line, result: Result) -> None:
        self._unsent[result.is_error].append(result.line(self._batch.id, line.number))

    def _take_all(self) -> None:
        while not self._unwritten.empty():
            self._take(*self._unwritten.get_nowait())

    async def _written(self) -> bool:
        """Whether the disk has taken all results."""
        try:
            await self._in_thread(self._append)
        except OSError:
            logger.exception("results of %s could not be written; trying again", self._batch.id)
            return False
        return True

    def _append(self) -> None:
        for is_error, file in ((False, self._output), (True, self._errors)):
            lines = self._unsent[is_error]
            count = len(lines)  # More may come meanwhile.
            file.append(lines[:count])
            del lines[:count]
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self._saved_at = time.monotonic()
            self._shared.store.save(self._counted())

    def _counted(self) -> Batch:
        return self._batch.model_copy(update={"completed": self._output.count, "failed": self._errors.count})

    def _close(self, closing_as: Status | None) -> None:
        """Gives the lines without a result an error, and makes the batch final."""
        done = self._recover()
        if closing_as != "completed":
            error = _CANCELLED if closing_as == "cancelled" else _EXPIRED
            reader = LineReader(self._shared.store.input(self._batch), done)
            try:
                while lines := reader.next():
                    ids = ((line, f"{self._batch.id}/{line.custom_id}") for line in lines)
                    self._errors.append(
                        Result(line.custom_id, request_id, error=error).line(self._batch.id, line.number)
                        for line, request_id in ids
                    )
            finally:
                reader.close()
        self._shared.store.finish(self._counted().entered(closing_as or "completed", time.time()))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
