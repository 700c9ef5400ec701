"""Unary calls of a channel without interceptors, as bytes, with span and errors like those of `open_channel`.

grpc.aio makes a call with interceptors out of two call objects and two tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc import StatusCode

from headrace.errors import from_rpc_error
from headrace.rpc.client.interceptors import ClientSpans
from headrace.telemetry.identity import carried_headers
from headrace.telemetry.suppression import is_tracing_suppressed


class UnaryMethod:
    """One method (`/package.Service/Method`) of the server behind `channel`, whose errors are signed `hop`."""

    def __init__(self, channel: grpc.aio.Channel, method: str, hop: str, spans: ClientSpans | None = None) -> None:
        self._call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        self._method = method
        self._hop = hop
        self._spans = spans or ClientSpans(streams=False)

    async def __call__(
        self, request: bytes, timeout_s: float | None, metadata: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        """The serialized response to a serialized request; raises HeadraceError. Cancelled, it cancels the call."""
        carried, end = (
            (carried_headers(), _nothing) if is_tracing_suppressed() else self._spans.open(self._method, timeout_s)
        )
        code = StatusCode.UNKNOWN
        try:
            answer = await self._call(request, timeout=timeout_s, metadata=(*metadata, *carried.items()))
            code = StatusCode.OK
            return answer
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise from_rpc_error(error, self._hop) from None
        except asyncio.CancelledError:
            code = StatusCode.CANCELLED
            raise
        finally:
            end(code)


def _nothing(_: StatusCode) -> None:
    """Ends no span."""
