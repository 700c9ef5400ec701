"""The search for the knee: raise the load until the objective breaks, then bisect. Pure.

A level that breaks is measured once more before it counts: one pause of the machine is not the knee.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONFIRMATIONS = 2


@dataclass
class KneeSearch:
    """`level` is the number of users to measure next, from `start` to `most`.

    The knee is exact to `precision`, a share of it, or to one user.
    """

    start: int
    most: int
    precision: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.most:
            raise ValueError(f"the search starts between 1 and {self.most} users, not at {self.start}")
        self.level = self.start
        self.held = 0
        self.broken: int | None = None
        self.done = False
        self._breaks = 0

    @property
    def knee(self) -> int:
        """The highest level that held so far; 0 if none did."""
        return self.held

    @property
    def bounded(self) -> bool:
        """Whether a level above the knee broke: else the knee is higher than `most`."""
        return self.broken is not None

    def record(self, held: bool) -> None:
        """Whether the present level held; chooses the next one."""
        if not held:
            self._breaks += 1
            if self._breaks < _CONFIRMATIONS:
                return
            self.broken = self.level
        else:
            self.held = self.level
        self._breaks = 0
        self._choose()

    def _choose(self) -> None:
        if self.broken is None:
            self.done = self.level >= self.most
            self.level = min(2 * self.level, self.most)
            return
        self.done = self.broken - self.held <= max(1, self.precision * self.held)
        if not self.done:
            self.level = (self.held + self.broken) // 2
