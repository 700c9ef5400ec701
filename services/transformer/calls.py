"""Checks that every front end makes before it reads a request."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.errors import InvalidRequestError

TTFT_MS = "x-ttft-ms"
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_MESSAGES = 4096  # Of one conversation: rendering more would stop the event loop.


def check_message_count(count: int) -> None:
    """Refuses a conversation of more messages than are rendered; call it before they are read."""
    if count > MAX_MESSAGES:
        raise InvalidRequestError(f"{count} messages, at most {MAX_MESSAGES} are allowed")


def check_stop(stop: Sequence[str]) -> None:
    """Refuses too many stop strings, and those that are empty or too long."""
    check_stop_count(len(stop))
    for text in stop:
        if not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")


def check_stop_count(count: int) -> None:
    """Refuses too many stop strings; call it before they are read."""
    if count > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{count} stop strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
