"""What every front end reads from a gRPC call."""

from __future__ import annotations

from millrace.errors import InvalidRequestError
from millrace.interceptors import Context
from millrace.recorded_call import MAX_REQUEST_ID

TTFT_MS = "x-ttft-ms"
_TIMEOUT_MS = "x-timeout-ms"
MAX_MESSAGES = 4096  # Of one conversation: rendering more would stop the event loop.


def check_request_id(given: str) -> None:
    """Refuses a caller's own id that is too long to be kept."""
    if len(given) > MAX_REQUEST_ID:
        raise InvalidRequestError(f"the request id has {len(given)} characters, at most {MAX_REQUEST_ID} are allowed")


def check_message_count(count: int) -> None:
    """Refuses a conversation of more messages than are rendered; to be asked before they are looked at."""
    if count > MAX_MESSAGES:
        raise InvalidRequestError(f"{count} messages, at most {MAX_MESSAGES} are allowed")


def timeout_of(context: Context) -> float | None:
    """Seconds that a caller of any protocol has left: its gRPC deadline or its `x-timeout-ms`, whichever is sooner."""
    given = [timeout for timeout in (_header_timeout_s(context), context.time_remaining()) if timeout is not None]
    return min(given, default=None)


def _header_timeout_s(context: Context) -> float | None:
    """What the header of a REST request says, which the gateway has checked."""
    for key, value in context.invocation_metadata() or ():
        if key == _TIMEOUT_MS and isinstance(value, str) and value.isdecimal():
            return int(value) / 1000
    return None
