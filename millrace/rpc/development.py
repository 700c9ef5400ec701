"""What calls of `Development` and `PredictorDevelopment` must bring along, which are for demonstrations alone.

The metadata `REQUESTED` is a header that a page of another origin cannot send without asking the gateway first, and the
gateway allows it no origin for this service (envoy/envoy.yaml), whatever GATEWAY_ALLOWED_ORIGINS says.
"""

from __future__ import annotations

from millrace.errors import ForbiddenError
from millrace.rpc.handlers import Context

SERVICE = "millrace.v1.Development"
REQUESTED = ("x-millrace-development", "true")


def check_requested(context: Context) -> None:
    """ForbiddenError where the call does not say that it is meant."""
    if REQUESTED not in tuple(context.invocation_metadata() or ()):
        raise ForbiddenError(f"this wants the header {REQUESTED[0]}: {REQUESTED[1]}")
