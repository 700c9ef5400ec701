"""Limits of a service: calls with a request in flight, bytes of requests, and idle calls.

A call is in flight from its message to its end, a stream of requests while one of them is. Beyond `max_calls` a call is
refused with RESOURCE_EXHAUSTED and `retry-after-ms` before its message is parsed. ByteBudget limits the bytes. Health
and reflection are not counted: a busy service is not a dead one.

A call is idle while it waits for a message and has no request in flight; it does not count towards `max_calls`. Beyond
`max_idle` the call that has been idle for longest ends. A call also ends after `idle_timeout_s` of idleness, or after
FIRST_MESSAGE_S if its method takes one message. A health watch is idle as long as it lasts. The call of a transformer
at its predictor (protos/steps.proto) is never idle.

gRPC holds the parts of a message until it is complete. Beyond `max_unfinished` bytes in all, idle calls end, those that
began to wait last first. Of those that have waited for longest, as many stay as cannot hold more than that: they began
before the memory was taken.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from contextvars import ContextVar
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.errors import DeadlineError, MillraceError, NotReadyError, OverloadedError
from millrace.rpc.byte_budget import COPIES, SMALL_BYTES, ByteBudget
from millrace.rpc.unfinished_messages import UnfinishedMessages
from millrace.telemetry.identity import Metadata

if TYPE_CHECKING:
    from millrace.rpc.handlers import Context

RETRY_AFTER_MS = 1000
FIRST_MESSAGE_S = 120.0
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")
_WATCH = "/grpc.health.v1.Health/Watch"
# From services and the gateway itself alone: silent for as long as there is nothing to record, and as large as records
# are.
_STEPS = "/millrace.v1.PredictorSteps/"
_INNER = ("/millrace.v1.PayloadIngest/", "/opentelemetry.proto.collector.logs.v1.LogsService/", _STEPS)
_SWEEP_S = 1.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # Above Envoy's 60 MiB, so that the gateway answers first.
_LOOK_S = 0.05
_SETTLE_S = 0.5
_GROWTH_BYTES = 16 * 1024 * 1024
_ARRIVAL_S = 0.05  # What has been arriving for a shorter time is most likely about to be whole.

T = TypeVar("T")

_current: ContextVar[Call | None] = ContextVar("call", default=None)


def error_of_call() -> MillraceError | None:
    """What the service has ended the call with that the task belongs to: it is cancelled, and its caller reads this."""
    call = _current.get()
    return None if call is None else call.error


def call_metadata(context: Context) -> Metadata:
    """The metadata of a call: those of the call that the task serves are at hand, grpc makes them anew each time."""
    call = _current.get()
    return tuple(context.invocation_metadata() or ()) if call is None else call.metadata


class Admission:
    """Owned by the event loop; one for all calls of a server."""

    def __init__(
        self,
        max_calls: int | None = None,
        budget: ByteBudget | None = None,
        max_idle: int = 4096,
        idle_timeout_s: float = 3600.0,
        max_unfinished: int = 2 * MAX_MESSAGE_BYTES,
    ) -> None:
        self.budget = budget or ByteBudget()
        self._max_calls = max_calls
        self._max_idle = max_idle
        self._idle_timeout_s = idle_timeout_s
        self._open: set[Call] = set()
        self._in_flight = 0
        # Since when, in that order. Apart, so that a call that is about to ask ends no stream that is idle.
        self._unsent: dict[Call, float] = {}
        self._idle: dict[Call, float] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._unfinished = UnfinishedMessages()
        self._max_unfinished = max_unfinished
        self._look: asyncio.TimerHandle | None = None
        self._unfinished_limit = max_unfinished
        self._settles_at = 0.0
        self._looks = False
        self._evicted = 0  # Since memory was below its limit, the last time.
        self._is_over = False

    @property
    def in_flight(self) -> int:
        """Calls with a request in flight, of those that are counted."""
        return self._in_flight

    @property
    def idle(self) -> int:
        """Calls that ask nothing now."""
        return len(self._idle) + len(self._unsent)

    def call(self, method: str, request_streaming: bool, metadata: Metadata = ()) -> Call:
        """A call's state, to be entered as a context manager; its methods raise MillraceError."""
        limit_s = self._idle_timeout_s if request_streaming else FIRST_MESSAGE_S
        return Call(self, method, request_streaming, limit_s, metadata)

    def cut_off(self) -> None:
        """Ends every open call, and those that still come, because the service stops."""
        self._is_over = True
        for call in self._open:
            call.end(_stopping())

    def check_room(self) -> None:
        """Raises OverloadedError where one more call in flight would be refused."""
        if self._max_calls is not None and self._in_flight >= self._max_calls:
            raise OverloadedError(f"{self._max_calls} calls are in flight", retry_after_ms=RETRY_AFTER_MS)

    def _begin_idle(self, call: Call) -> None:
        loop, calls = asyncio.get_running_loop(), self._idle_of(call)
        calls[call] = loop.time()
        if len(calls) > self._max_idle:
            error = OverloadedError("too many calls are open that ask nothing", retry_after_ms=RETRY_AFTER_MS)
            next(iter(calls)).end(error)
        if self._sweep is None:
            self._sweep = loop.call_later(_SWEEP_S, self._end_overdue)
        if self._look is None:
            self._look = loop.call_later(_LOOK_S, self._look_at_memory)

    def _end_idle(self, call: Call) -> None:
        self._idle_of(call).pop(call, None)

    def _idle_of(self, call: Call) -> dict[Call, float]:
        return self._idle if call.may_be_idle else self._unsent

    def _end_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        now, self._sweep = loop.time(), None
        for call, since in (*self._idle.items(), *self._unsent.items()):
            if now - since >= call.idle_limit_s:
                call.end(DeadlineError(f"nothing was asked for {call.idle_limit_s:g} s"))
        if self.idle:
            self._sweep = loop.call_later(_SWEEP_S, self._end_overdue)

    def _look_at_memory(self) -> None:
        """Ends calls whose messages take too much memory before they are whole: those that began to arrive last."""
        loop, self._look = asyncio.get_running_loop(), None
        if not self.idle:
            self._evicted, self._unfinished_limit, self._looks = 0, self._max_unfinished, False
            return
        if not self._looks:  # Not where every call has its message at once.
            self._looks = True
            self._unfinished.begin()
        unfinished = self._unfinished.estimate()
        if unfinished > self._unfinished_limit:
            self._evict(max(1 + unfinished // MAX_MESSAGE_BYTES, 2 * self._evicted), loop.time() - _ARRIVAL_S)
            # What they held is not free at once: more end where it still grows.
            self._unfinished_limit = unfinished + _GROWTH_BYTES
            self._settles_at = loop.time() + _SETTLE_S
            self.budget.trim_after(_LOOK_S)
        elif loop.time() >= self._settles_at:
            self._evicted, self._unfinished_limit = 0, self._max_unfinished
        self._look = loop.call_later(_LOOK_S, self._look_at_memory)

    def _evict(self, count: int, idle_before: float) -> None:
        waiting = (*self._idle.items(), *self._unsent.items())
        suspects = [(since, call) for call, since in waiting if since <= idle_before and call.may_arrive]
        suspects.sort(key=itemgetter(0), reverse=True)
        suspects = suspects[: max(0, len(suspects) - self._max_unfinished // MAX_MESSAGE_BYTES)]
        error = OverloadedError(
            "messages that are not whole take all the memory that they may", retry_after_ms=RETRY_AFTER_MS
        )
        for _, call in suspects[:count]:
            call.end(error)
        self._evicted = min(count, len(suspects))


class Call:
    """One call, from its first moment to its end, in the task that serves it."""

    def __init__(
        self, admission: Admission, method: str, request_streaming: bool, idle_limit_s: float, metadata: Metadata
    ) -> None:
        self.metadata = metadata
        self._admission = admission
        self._is_counted = not method.startswith(_UNCOUNTED)
        self.is_inner = method.startswith(_INNER)
        self._watches = method == _WATCH
        self._is_never_idle = method.startswith(_STEPS)
        self.may_be_idle = request_streaming or self._watches  # As it is meant to be.
        self.may_arrive = not self._watches and not self.is_inner
        self.idle_limit_s = math.inf if self._watches or self.is_inner else idle_limit_s
        self._task: asyncio.Task[Any] | None = None  # That serves it, until it ends.
        self._cancelled_before = 0  # How often that task was to be cancelled by others.
        self.error: MillraceError | None = None  # What the service ends it with.
        self._bytes = 0
        self._requests = 0
        self._receives = False
        self._is_cut = False

    async def __aenter__(self) -> Call:
        if self._admission._is_over:
            raise _stopping()
        if self._is_counted and not self.may_be_idle:
            self._admission.check_room()  # Before its message is received.
        self._task = asyncio.current_task()
        self._cancelled_before = self._task.cancelling() if self._task is not None else 0
        self._admission._open.add(self)
        _current.set(self)  # In the context of the task that serves it, and of those that it starts.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        admission = self._admission
        admission._open.discard(self)
        admission._end_idle(self)
        if self._requests and self._is_counted:
            admission._in_flight -= 1
        self._requests = 0
        if self._bytes:
            admission.budget.release(self._bytes)
            self._bytes = 0
        task, self._task = self._task, None
        # As asyncio.timeout does: a cancel that is not only ours stays one.
        is_ours = self._is_cut and task is not None and task.uncancel() <= self._cancelled_before
        if is_ours and self.error is not None and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self.error from None

    def end(self, error: MillraceError) -> None:
        """Ends the call with an error, if it has not ended; the first one counts."""
        self._admission._end_idle(self)
        if self.error is None and self in self._admission._open:
            self.error = error
            asyncio.get_running_loop().call_soon(self._cut)

    def _cut(self) -> None:
        if self._task is not None and not self._is_cut:
            self._is_cut = self._task.cancel()

    async def receive(self, message: Awaitable[T]) -> T:
        """The call's next message; idle meanwhile, unless a request is in flight."""
        self._receives = True
        if not self._requests and self in self._admission._open and not self._is_never_idle:
            self._admission._begin_idle(self)
        try:
            received = await message
            if isinstance(received, bytes):
                self._admission._unfinished.message_read(len(received))
            return received
        finally:
            self._receives = False
            if not self._watches:
                self._admission._end_idle(self)

    def begin(self) -> None:
        """Counts one more request of the call as in flight; raises OverloadedError."""
        if not self._requests:
            if self._is_counted:
                self._admission.check_room()
                self._admission._in_flight += 1
            if not self._watches:
                self._admission._end_idle(self)
        self._requests += 1

    def finish(self) -> None:
        if not self._requests:
            return  # The call has ended.
        self._requests -= 1
        if not self._requests:
            if self._is_counted:
                self._admission._in_flight -= 1
            if self._receives:
                self._admission._begin_idle(self)

    def reserve(self, size: int) -> None:
        """Takes so many bytes of the budget until the call ends or they are released."""
        self._admission.budget.reserve(size)
        self._bytes += size

    async def reserve_in_turn(self, size: int) -> None:
        """As `reserve`, but waits for its turn where requests of this call hold bytes: what comes next can wait.

        So can what comes from another service.
        """
        if self._bytes or self.is_inner:
            await self._admission.budget.reserve_in_turn(size)
            self._bytes += size
        else:
            self.reserve(size)

    def release(self, size: int) -> None:
        if self._bytes:  # The call has not ended.
            self._bytes -= size
            self._admission.budget.release(size)


def charge_of(size: int) -> int:
    """Bytes of the budget that a message of a size is charged with."""
    return 0 if size <= SMALL_BYTES else size * COPIES


def _stopping() -> NotReadyError:
    return NotReadyError("the service stops")
