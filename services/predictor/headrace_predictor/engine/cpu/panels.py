"""The sizes of streamed weights' panels, blocks and groups; see products.py and grouped.py."""

from typing import NamedTuple

PANEL = 64  # Output channels that are computed together.
BLOCK = 128  # Inputs of one step; those that share a scale in the integer formats.
GROUP = 32  # Inputs that share a scale of 4-bit weights.
GROUP_BYTES = PANEL * (2 + GROUP // 2)  # Of a panel: its scales and weights of a group.
ROWS = 4  # Rows that read the weights together.
HALF = GROUP // 2  # Inputs whose sum is kept for grouped weights.


class Kind(NamedTuple):
    """Of grouped weights: `bits` of a weight, float32 `scales` of a group, and whether a minimum is subtracted."""

    bits: int
    scales: int
    has_minimum: bool

    @property
    def group_bytes(self) -> int:
        return PANEL * (4 * self.scales + 4 * self.has_minimum + GROUP * self.bits // 8)


KINDS = (Kind(4, 1, True), Kind(8, 1, False), Kind(8, 1, True), Kind(8, 2, False))
