"""Client channels to other hops: message limits, keepalive, error mapping and telemetry."""

from __future__ import annotations

import grpc

from headrace.rpc.client.interceptors import error_client_interceptors, telemetry_client_interceptors
from headrace.rpc.server.server import MESSAGE_OPTIONS

_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 30.0, 10.0


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
    """A channel to `target` (host:port) without interceptors, for the methods of unary_method.py.

    It shares the connection of the other channels to the same target.
    """
    return grpc.aio.insecure_channel(target, options=channel_options())


def open_channel(target: str, hop: str) -> grpc.aio.Channel:
    """A channel to `target` (host:port) whose failed calls raise `HeadraceError` signed `hop`."""
    # The first interceptor is the outermost: spans see the status before it is translated.
    interceptors = (*error_client_interceptors(hop), *telemetry_client_interceptors())
    return grpc.aio.insecure_channel(target, options=channel_options(), interceptors=interceptors)
