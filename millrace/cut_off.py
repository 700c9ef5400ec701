"""Ends the calls that outlast a service's drain: they are told that it stops, and not that they were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from millrace.errors import NotReadyError
from millrace.interceptors import Context, Continuation, Handler, guard_handler


class CutOffInterceptor(grpc.aio.ServerInterceptor):
    """Owned by the event loop; stands within the interceptor that reports errors."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._is_over = False

    def cut_off(self) -> None:
        """Ends every open call, and those that still come, with NotReadyError."""
        self._is_over = True
        now = asyncio.get_running_loop().time()
        for call in self._open:
            call.reschedule(now)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else guard_handler(handler, self._until_cut_off)

    @asynccontextmanager
    async def _until_cut_off(self, context: Context) -> AsyncIterator[None]:
        if self._is_over:
            raise _stopping()
        limit = asyncio.timeout(None)
        self._open.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise _stopping() from None
            raise
        finally:
            self._open.discard(limit)


def _stopping() -> NotReadyError:
    return NotReadyError("the service stops")
