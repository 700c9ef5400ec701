"""What every front end reads from a gRPC call."""

from __future__ import annotations

import uuid

from millrace.errors import InvalidRequestError
from millrace.interceptors import Context

REQUEST_ID = "x-request-id"
TTFT_MS = "x-ttft-ms"
TIMEOUT_MS = "x-timeout-ms"
MAX_MESSAGES = 4096  # Of one conversation: rendering more would stop the event loop.
_MAX_REQUEST_ID = 256


def request_id_of(context: Context, given: str = "") -> str:
    """The caller's own id, else the gateway's, else a new one."""
    if len(given) > _MAX_REQUEST_ID:
        raise InvalidRequestError(f"the request id has {len(given)} characters, at most {_MAX_REQUEST_ID} are allowed")
    if given:
        return given
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str) and value:
            return value[:_MAX_REQUEST_ID]
    return str(uuid.uuid4())


def check_message_count(count: int) -> None:
    """Refuses a conversation of more messages than are rendered; to be asked before they are looked at."""
    if count > MAX_MESSAGES:
        raise InvalidRequestError(f"{count} messages, at most {MAX_MESSAGES} are allowed")


def rest_timeout_s(context: Context) -> float | None:
    """Seconds that the header `x-timeout-ms` gives a REST request, which the gateway has checked."""
    for key, value in context.invocation_metadata() or ():
        if key == TIMEOUT_MS and isinstance(value, str) and value.isdecimal():
            return int(value) / 1000
    return context.time_remaining()


def timeout_of(context: Context) -> float | None:
    """Seconds that a caller of any protocol has left: its gRPC deadline or its `x-timeout-ms`, whichever is sooner."""
    given = [timeout for timeout in (rest_timeout_s(context), context.time_remaining()) if timeout is not None]
    return min(given, default=None)


def as_metadata(value: str) -> str:
    """Text as gRPC metadata allows it: printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in value)
