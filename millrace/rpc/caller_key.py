"""The key that a program of ours sends with its calls to a gateway: the environment's MILLRACE_KEY, none without it.

For the commands that call a running stack. `headers` are for HTTP, `with_key` and `key_interceptors` for gRPC; without
a key they change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

KEY = "MILLRACE_KEY"
_AUTHORIZATION = "authorization"


def headers() -> dict[str, str]:
    """The headers of a call."""
    key = os.environ.get(KEY, "").strip()
    return {_AUTHORIZATION: f"Bearer {key}"} if key else {}


def with_key(channel: grpc.Channel) -> grpc.Channel:
    """The channel, whose calls have the key."""
    return grpc.intercept_channel(channel, _Adder(tuple(headers().items()))) if headers() else channel


def key_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors of a channel of grpc.aio, whose calls then have the key."""
    own = tuple(headers().items())
    return [kind(own) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)] if own else []


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Adder(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds metadata to every call."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata

    def _intercept(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(
            _Details(
                details.method,
                details.timeout,
                (*(details.metadata or ()), *self._metadata),
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


class _AioAdder:
    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata

    async def _intercept(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._metadata)
        return await continuation(details._replace(metadata=metadata), request)


# A channel takes an interceptor for one kind of call alone.
class _UnaryUnary(_AioAdder, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _AioAdder._intercept


class _UnaryStream(_AioAdder, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _AioAdder._intercept


class _StreamUnary(_AioAdder, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary: Any = _AioAdder._intercept


class _StreamStream(_AioAdder, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream: Any = _AioAdder._intercept
