"""A bound on the calls that one service has in flight: beyond it a call is refused before its message is read.

Without it a flood of calls would be parsed, tokenised and recorded before a full queue further on could refuse them,
and those that are served would wait for the others' refusals. Health and reflection are not counted: a busy service is
not a dead one. A refusal is RESOURCE_EXHAUSTED with `retry-after-ms`, as that of a full queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from millrace.errors import OverloadedError
from millrace.interceptors import Context, Continuation, Handler, guard_handler

RETRY_AFTER_MS = 1000
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Owned by the event loop; stands outside of the interceptor that reads the requests, and so signs by itself."""

    def __init__(self, hop: str, max_calls: int) -> None:
        self._hop = hop
        self._max_calls = max_calls
        self._in_flight = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_UNCOUNTED):
            return handler
        return guard_handler(handler, self._admitted)

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[None]:
        if self._in_flight >= self._max_calls:
            error = OverloadedError(f"{self._max_calls} calls are in flight", retry_after_ms=RETRY_AFTER_MS)
            await context.abort(error.status, error.message, error.trailing_metadata(self._hop))
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
