"""Client channels to other hops: message limits, keepalive, error mapping, telemetry, health."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import HeadraceError, from_rpc_error
from headrace.rpc.client.interceptors import ClientSpans, client_interceptors
from headrace.rpc.limits.byte_budget import MESSAGE_OPTIONS
from headrace.telemetry.identity import carried_headers
from headrace.telemetry.rpc import is_tracing_suppressed

_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 30.0, 10.0
_HEALTH_TIMEOUT_S, _HEALTH_INTERVAL_S = 2.0, 1.0


def channel_options(
    keepalive_s: float = _KEEPALIVE_S, keepalive_timeout_s: float = _KEEPALIVE_TIMEOUT_S
) -> tuple[tuple[str, int], ...]:
    """The options of a channel to a hop, which is pinged so often and must answer within so long."""
    return (
        *MESSAGE_OPTIONS,
        ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", round(1000 * keepalive_timeout_s)),
        # A hop that is back must be found at once, not after a minute of backoff.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),  # Envoy retries, where a retry is safe.
        ("grpc.enable_http_proxy", 0),  # The environment's, which leads out of the stack.
    )


def open_plain_channel(target: str) -> grpc.aio.Channel:
    """A channel to `target` (host:port) without interceptors, for `UnaryMethod`.

    It shares the connection of the other channels to the same target.
    """
    return grpc.aio.insecure_channel(target, options=channel_options())


def open_channel(target: str, hop: str) -> grpc.aio.Channel:
    """A channel to `target` (host:port) whose failed calls raise `HeadraceError` signed `hop`."""
    return grpc.aio.insecure_channel(target, options=channel_options(), interceptors=client_interceptors(hop))


class UnaryMethod:
    """One method (`/package.Service/Method`) of the server behind `channel`, whose errors are signed `hop`.

    Takes and gives bytes, with span and errors like those of `open_channel`, on a channel without interceptors, since
    grpc.aio makes a call with interceptors out of two call objects and two tasks.
    """

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


async def is_serving(channel: grpc.aio.Channel, name: str) -> bool:
    """Whether the server behind a channel of `open_channel` reports SERVING for `name`; False if it does not answer."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_HEALTH_TIMEOUT_S)  # type: ignore[attr-defined]
    except HeadraceError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def watch_serving(channel: grpc.aio.Channel, name: str, report: Callable[[bool], Awaitable[None]]) -> None:
    """Reports every second whether `name` is served, until cancelled."""
    while True:
        await report(await is_serving(channel, name))
        await asyncio.sleep(_HEALTH_INTERVAL_S)
