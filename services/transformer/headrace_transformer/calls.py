"""Checks that every front end makes before it reads a request."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvalidRequestError

TTFT_MS = "x-ttft-ms"
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 256
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


def check_bad_words(words: Sequence[str]) -> None:
    """Refuses too many bad words, and those that are empty or too long."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"{len(words)} bad words, at most {MAX_BAD_WORDS} are allowed", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidRequestError(f"a bad word must have 1 to {MAX_BAD_WORD_LENGTH} characters", param="bad_words")
