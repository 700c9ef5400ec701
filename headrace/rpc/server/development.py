"""The header that calls of `Development` and `PredictorDevelopment` need; both services are for demonstrations only.

The metadata `REQUESTED` is a header that a page of another origin cannot send without asking the gateway first, and the
gateway allows it no origin for this service (envoy/envoy.yaml), regardless of GATEWAY_ALLOWED_ORIGINS.
"""

from __future__ import annotations

from headrace.errors import ForbiddenError
from headrace.rpc.server.handlers import Context

SERVICE = "headrace.v1.Development"
REQUESTED = ("x-headrace-development", "true")


def check_requested(context: Context) -> None:
    """Raises ForbiddenError if the call lacks the header."""
    if REQUESTED not in tuple(context.invocation_metadata() or ()):
        raise ForbiddenError(f"the call needs the header {REQUESTED[0]}: {REQUESTED[1]}")
