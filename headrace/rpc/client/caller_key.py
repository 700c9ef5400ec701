"""The key that a program of ours sends with its calls to a gateway: the environment's HEADRACE_KEY, none without it.

For the commands that call a running stack: `headers` are for HTTP and single gRPC calls, `with_key` for the calls of a
channel.
"""

import os
from collections.abc import Callable
from typing import Any

import grpc

KEY = "HEADRACE_KEY"
_AUTHORIZATION = "authorization"


def headers(variable: str = KEY) -> dict[str, str]:
    """The headers of a call with the key of an environment variable; empty without a key."""
    key = os.environ.get(variable, "").strip()
    return {_AUTHORIZATION: f"Bearer {key}"} if key else {}


def with_key(channel: grpc.Channel, variable: str = KEY) -> grpc.Channel:
    """The channel; its calls have the key of an environment variable, if there is one."""
    return grpc.intercept_channel(channel, _Adder(variable)) if headers(variable) else channel


class _Adder(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the headers to every call."""

    def __init__(self, variable: str) -> None:
        self._variable = variable

    def _intercept(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), *headers(self._variable).items())
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept
