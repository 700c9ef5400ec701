"""What a process keeps for each client, such as counters, for a bounded number of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_MAX_CLIENTS = 1000

T = TypeVar("T")


class ByClient(Generic[T]):
    """Values by client name. Beyond 1000 clients, those whose values `matters` rejects are dropped.

    Owned by the event loop.
    """

    def __init__(self, make: Callable[[], T], matters: Callable[[T], bool]) -> None:
        self._make = make
        self._matters = matters
        self._values: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, name: str) -> T:
        """The client's value, which is made if there is none."""
        value = self._values.get(name)
        if value is None:
            if len(self._values) >= _MAX_CLIENTS:
                self._values = {name: value for name, value in self._values.items() if self._matters(value)}
            value = self._values[name] = self._make()
        return value
