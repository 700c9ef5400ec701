"""Limits of a service: calls with a request in flight, bytes of requests, and idle calls.

A call is in flight from its message to its end, a stream of requests while one of them is. Beyond `max_calls` a call is
refused with RESOURCE_EXHAUSTED and `retry-after-ms` before its message is parsed. ByteBudget limits the bytes. Health
and reflection are not counted: a busy service is not a dead one.

A call is idle while it waits for a message and has no request in flight; it does not count towards `max_calls`. Beyond
`max_idle` in all, or `max_idle_of_one` of one caller, an idle call ends (idle_calls.py). It also ends after
`idle_timeout_s`, or after FIRST_MESSAGE_S if its method takes one message. A health watch is idle as long as it lasts.
The call of a transformer at its predictor (headrace_protos/steps.proto) is never idle.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cached_property
from types import TracebackType
from typing import TypeVar

from headrace.clients import Client, caller_of, client_of
from headrace.errors import HeadraceError, NotReadyError, OverloadedError, UnauthenticatedError
from headrace.rpc import Context
from headrace.rpc.limits.byte_budget import COPIES, MAX_MESSAGE_BYTES, RETRY_AFTER_MS, SMALL_BYTES, ByteBudget
from headrace.rpc.limits.client_limits import ClientLimits, Pairs
from headrace.rpc.limits.idle_calls import IdleCalls
from headrace.settings import ServiceSettings
from headrace.telemetry.identity import Metadata
from headrace.telemetry.rpc import INNER, PROBES

FIRST_MESSAGE_S = 120.0
_WATCH = "/grpc.health.v1.Health/Watch"

T = TypeVar("T")

_current: ContextVar[AdmittedCall | None] = ContextVar("call", default=None)


def error_of_call() -> HeadraceError | None:
    """The error with which the service ended this task's call; the task is cancelled, and the caller gets the error."""
    call = _current.get()
    return None if call is None else call.error


def call_metadata(context: Context) -> Metadata:
    """The metadata of a call; cached for the call that this task serves, because grpc builds them at each access."""
    call = _current.get()
    return tuple(context.invocation_metadata() or ()) if call is None else call.metadata


def caller_of_call() -> str:
    """The caller of the call that this task serves; "" for another service, or if it serves none."""
    call = _current.get()
    return "" if call is None else call.caller


def head_of_call() -> ResponseHead:
    """The head of the answer to the call that the task serves; one that is never sent, if it serves none."""
    call = _current.get()
    return ResponseHead(tuple) if call is None else call.head


class Admission:
    """Owned by the event loop; one for all calls of a server."""

    def __init__(
        self,
        max_calls: int | None = None,
        budget: ByteBudget | None = None,
        max_idle: int = 4096,
        idle_timeout_s: float = 3600.0,
        max_unfinished: int = 2 * MAX_MESSAGE_BYTES,
        max_idle_of_one: int = 3072,
    ) -> None:
        self.budget = budget or ByteBudget()
        self._max_calls = max_calls
        self._idle_timeout_s = idle_timeout_s
        self._open: set[AdmittedCall] = set()
        self.in_flight = 0  # Calls with a request in flight, of those that are counted.
        self.limits = ClientLimits()
        self._idle = IdleCalls(max_idle, max_idle_of_one, max_unfinished, self.budget)
        self._is_over = False

    @classmethod
    def of(cls, settings: ServiceSettings, max_calls: int | None = None) -> Admission:
        """As a service's settings say; by default calls in flight are not counted."""
        return cls(
            max_calls,
            ByteBudget(settings.request_memory),
            max_idle=settings.max_idle_calls,
            idle_timeout_s=settings.idle_timeout,
            max_idle_of_one=settings.max_idle_calls_per_client,
        )

    @property
    def idle(self) -> int:
        return len(self._idle)

    def call(self, method: str, request_streaming: bool, metadata: Metadata = ()) -> AdmittedCall:
        """A call's state, to be entered as a context manager; its methods raise HeadraceError."""
        limit_s = self._idle_timeout_s if request_streaming else FIRST_MESSAGE_S
        return AdmittedCall(self, method, request_streaming, limit_s, metadata)

    def cut_off(self) -> None:
        """Ends every open call, and those that arrive later, because the service stops."""
        self._is_over = True
        for call in self._open:
            call.end(_stopping())

    def check_room(self) -> None:
        """Raises OverloadedError where one more call in flight would be refused."""
        if self._max_calls is not None and self.in_flight >= self._max_calls:
            raise OverloadedError(f"{self._max_calls} calls are in flight", retry_after_ms=RETRY_AFTER_MS)


class AdmittedCall:
    """One call, from its start to its end, in the task that serves it."""

    def __init__(
        self, admission: Admission, method: str, request_streaming: bool, idle_limit_s: float, metadata: Metadata
    ) -> None:
        self.metadata = metadata
        self._admission = admission
        self._is_counted = not method.startswith(PROBES)
        self.is_inner = method.startswith(INNER)  # It may be silent for long, and as large as records.
        self._watches = method == _WATCH
        self.may_be_idle = request_streaming or self._watches  # By design.
        self.may_arrive = not self._watches and not self.is_inner
        self.idle_limit_s = math.inf if self._watches or self.is_inner else idle_limit_s
        self.error: HeadraceError | None = None  # What the service ends it with.
        self._bytes = 0
        self._requests = 0
        self._limited: Client | None = None  # Whose requests are counted too, once there is one.
        self._receives = False
        self._cut = asyncio.timeout(None)  # By `end`.
        self.head = ResponseHead(self._remaining)

    @cached_property
    def client(self) -> Client:
        """Whose key the call has; raises UnauthenticatedError if its policy cannot be read."""
        return client_of(self.metadata)

    @cached_property
    def caller(self) -> str:
        """The name of the caller; "" for other services."""
        return caller_of(self.metadata)

    async def __aenter__(self) -> AdmittedCall:
        if self._admission._is_over:
            raise _stopping()
        if self._is_counted and not self.may_be_idle:
            self._admission.check_room()  # Before its message is received.
        await self._cut.__aenter__()
        self._admission._open.add(self)
        _current.set(self)  # In the context of the task that serves it, and of those that it starts.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        admission = self._admission
        admission._open.discard(self)
        admission._idle.discard(self)
        if self._requests and self._is_counted:
            admission.in_flight -= 1
        if self._limited is not None:
            for _ in range(self._requests):
                admission.limits.finish(self._limited)
        self._requests = 0
        if self._bytes:
            admission.budget.release(self._bytes)
            self._bytes = 0
        try:
            await self._cut.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self.error or _stopping() from None

    def end(self, error: HeadraceError) -> None:
        """Ends the call with an error, if it has not ended; only the first error has an effect."""
        self._admission._idle.discard(self)
        if self.error is None and self in self._admission._open:
            self.error = error
            self._cut.reschedule(0.0)

    async def receive(self, message: Awaitable[T]) -> T:
        """The call's next message; idle meanwhile, unless a request is in flight."""
        self._receives = True
        if not self._requests and self in self._admission._open:
            self._admission._idle.add(self)
        try:
            received = await message
            self._admission._idle.arrived(self)
            return received
        finally:
            self._receives = False
            if not self._watches:
                self._admission._idle.discard(self)

    def begin(self) -> None:
        """Counts one more request of the call as in flight; raises OverloadedError."""
        if self._limited is None and self._is_counted:
            self._limited = self.client if self.client.is_limited else None
        if self._limited is not None:
            self._admission.limits.begin(self._limited)
        if not self._requests:
            if self._is_counted:
                self._admission.check_room()
                self._admission.in_flight += 1
            if not self._watches:
                self._admission._idle.discard(self)
        self._requests += 1

    def _remaining(self) -> Pairs:
        """Headers with the remaining limits of the client for this minute."""
        try:
            return self._admission.limits.remaining(self.client) if self.client.has_minute else ()
        except UnauthenticatedError:  # With which the call ends.
            return ()

    def finish(self) -> None:
        if not self._requests:
            return  # The call has ended.
        self._requests -= 1
        if self._limited is not None:
            self._admission.limits.finish(self._limited)
        if not self._requests:
            if self._is_counted:
                self._admission.in_flight -= 1
            if self._receives:
                self._admission._idle.add(self)

    def reserve(self, size: int) -> None:
        """Takes so many bytes of the budget until the call ends or they are released."""
        self._admission.budget.reserve(size)
        self._bytes += size

    async def reserve_in_turn(self, size: int) -> None:
        """As `reserve`, but waits for its turn if requests of this call hold bytes, or if another service calls."""
        if self._bytes or self.is_inner:
            await self._admission.budget.reserve_in_turn(size)
            self._bytes += size
        else:
            self.reserve(size)

    def release(self, size: int) -> None:
        if self._bytes:  # The call has not ended.
            self._bytes -= size
            self._admission.budget.release(size)


class ResponseHead:
    """The metadata with which a call's answer begins: sent once, before its first message.

    The answer to a client with limits for a minute begins with its remaining amounts, `remaining`, as they are when it
    is sent. A call that fails before its first message has all of it in its trailing metadata instead: HTTP clients see
    both as headers.
    """

    __slots__ = ("_metadata", "_remaining", "is_sent")

    def __init__(self, remaining: Callable[[], Pairs]) -> None:
        self.is_sent = False
        self._metadata: Pairs = ()
        self._remaining = remaining

    def add(self, *metadata: tuple[str, str]) -> None:
        """Adds metadata, replacing those with the same names; has no effect after the head was sent."""
        names = {name for name, _ in metadata}
        self._metadata = (*(pair for pair in self._metadata if pair[0] not in names), *metadata)

    def value(self, name: str) -> str:
        """What was added by a name; "" for nothing."""
        return next((value for known, value in self._metadata if known == name), "")

    async def send(self, context: Context, even_empty: bool = False) -> None:
        """Sends the head once; an empty one only if `even_empty`."""
        if self.is_sent:
            return
        metadata = self.take()
        if metadata or even_empty:
            await context.send_initial_metadata(metadata)

    def take(self) -> Pairs:
        """Returns the metadata that have not been sent; they will not be sent any more."""
        if self.is_sent:
            return ()
        self.is_sent = True
        return self._metadata + self._remaining()


def charge_of(size: int) -> int:
    """Bytes of the budget that a message of a size is charged with."""
    return 0 if size <= SMALL_BYTES else size * COPIES


def _stopping() -> NotReadyError:
    return NotReadyError("the service is stopping")
