"""The blocks that sequences hold, and the names under which other sequences find and reuse them. Pure."""

from __future__ import annotations

from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Row, Sequence


class Holdings:
    """Gives blocks to sequences and takes them back. `reuses_prefixes`: see the scheduler."""

    def __init__(self, blocks: BlockManager, reuses_prefixes: bool) -> None:
        self._blocks = blocks
        self._reuses_prefixes = reuses_prefixes

    def find(self, sequence: Sequence) -> tuple[list[int], bool]:
        """The blocks with a sequence's first ids, and whether another sequence computes the next one."""
        if not self._reuses_prefixes:
            return [], False
        full = sequence.reusable // self._blocks.block_tokens
        return self._blocks.find(sequence.block_names(full, self._blocks.block_tokens))

    def missing(self, sequence: Sequence, cached: list[int]) -> int:
        """How many blocks are too few for the known ids of a sequence that would start, and the next one."""
        return self.needed(sequence, cached) - (self._blocks.free - self._blocks.idle(cached))

    def needed(self, sequence: Sequence, cached: list[int]) -> int:
        return self._blocks.blocks_for(len(sequence.ids) + 1) - len(cached)

    def start(self, sequence: Sequence, cached: list[int]) -> None:
        """Gives a sequence the cached blocks, and announces the names of those that it will compute."""
        self._blocks.share(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self._blocks.block_tokens
        if sequence.timeline.started is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.input_ids))
        if self._reuses_prefixes:
            full = len(sequence.ids) // self._blocks.block_tokens
            sequence.announced = sequence.block_names(full, self._blocks.block_tokens)[len(cached) :]
            self._blocks.announce(sequence.announced)

    def complete(self, row: Row) -> None:
        """Records that a row's ids have been computed: other sequences can reuse their blocks."""
        sequence = row.sequence
        before, sequence.computed = sequence.computed, row.start + row.count
        if self._reuses_prefixes:
            size = self._blocks.block_tokens
            first, end = before // size, sequence.computed // size
            if first < end:
                names = sequence.block_names(end, size)
                for index in range(first, end):
                    self._blocks.name(sequence.blocks[index], names[index])

    def release(self, sequence: Sequence, forget: bool = False) -> list[int]:
        """Takes all blocks back; returns those that are void now. With `forget` none is reusable."""
        self._blocks.withdraw(sequence.announced)
        sequence.announced = []
        released = self._blocks.release(sequence.blocks, forget)
        sequence.blocks = []
        sequence.computed = 0
        sequence.state = None
        return released
