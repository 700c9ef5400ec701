"""The metadata with which a call's answer begins: collected while the call is handled, and sent once, before its first
message.

The answer of a client with a limit by the minute begins with what remains of it (client_limits.py). A call that fails
before its first message has all of it in its trailing metadata instead: HTTP clients see both as headers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.rpc.handlers import Context

Pairs = tuple[tuple[str, str], ...]


class ResponseHead:
    """Of one call; `remaining` is evaluated when it is sent."""

    __slots__ = ("_metadata", "_remaining", "is_sent")

    def __init__(self, remaining: Callable[[], Pairs]) -> None:
        self.is_sent = False
        self._metadata: Pairs = ()
        self._remaining = remaining

    def add(self, *metadata: tuple[str, str]) -> None:
        """Adds to what is sent, in place of what has the same names; without effect once it is."""
        names = {name for name, _ in metadata}
        self._metadata = (*(pair for pair in self._metadata if pair[0] not in names), *metadata)

    async def send(self, context: Context, even_empty: bool = False) -> None:
        """Sends it, unless it is sent or, where that is not required, empty."""
        if self.is_sent:
            return
        metadata = self.take()
        if metadata or even_empty:
            await context.send_initial_metadata(metadata)

    def take(self) -> Pairs:
        """What has not been sent, and no more is."""
        if self.is_sent:
            return ()
        self.is_sent = True
        return self._metadata + self._remaining()
