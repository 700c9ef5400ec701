"""The metadata with which a call's answer begins: collected while the call is handled, and sent once, before its first
message.

The answer to a client with limits for a minute begins with its remaining amounts (client_limits.py). A call that fails
before its first message has all of it in its trailing metadata instead: HTTP clients see both as headers.
"""

from collections.abc import Callable

from headrace.rpc import Context

Pairs = tuple[tuple[str, str], ...]


class ResponseHead:
    """Of one call; `remaining` is evaluated when it is sent."""

    __slots__ = ("_metadata", "_remaining", "is_sent")

    def __init__(self, remaining: Callable[[], Pairs]) -> None:
        self.is_sent = False
        self._metadata: Pairs = ()
        self._remaining = remaining

    def add(self, *metadata: tuple[str, str]) -> None:
        """Adds metadata, replacing those with the same names; has no effect after the head was sent."""
        names = {name for name, _ in metadata}
        self._metadata = (*(pair for pair in self._metadata if pair[0] not in names), *metadata)

    def value(self, name: str) -> str:
        """What was added by a name; "" for nothing."""
        return next((value for known, value in self._metadata if known == name), "")

    async def send(self, context: Context, even_empty: bool = False) -> None:
        """Sends the head once; an empty one only if `even_empty`."""
        if self.is_sent:
            return
        metadata = self.take()
        if metadata or even_empty:
            await context.send_initial_metadata(metadata)

    def take(self) -> Pairs:
        """Returns the metadata that have not been sent; they will not be sent any more."""
        if self.is_sent:
            return ()
        self.is_sent = True
        return self._metadata + self._remaining()
