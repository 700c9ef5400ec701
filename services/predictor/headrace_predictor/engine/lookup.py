"""Prompt lookup: where a stream's last tokens occurred before, the tokens that followed there are proposed as the next.

One step computes them all, and those that the sampler chooses too are the stream's tokens: the answer is the same, in
fewer steps. A step of a few more rows takes longer, so tokens are proposed only where they pay: while few streams run,
and while the gain expected from a stream's recent proposals exceeds the measured cost. A proposal that is not computed
is compared with the tokens that follow all the same, so a stream whose text does not repeat costs nothing but that.

Used only by the engine's thread. Source: prompt lookup decoding (Saxena 2023); speculative sampling with a proposal
that has no probabilities of its own, and a sampler that is a function of position and seed, is a comparison.
"""

from collections import deque
from collections.abc import Sequence as Rows

from headrace_predictor.engine.cpu.step_sizes import size_above, size_below
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Row, Sequence

_MATCH = 3  # Tokens.
_MOST = 7  # Proposed tokens of a stream: with its newest they are a step's smallest size.
_STREAMS = 4
_MEMORY = 0.85  # The weight of earlier proposals relative to the latest token.
_LEAST_RATE = 0.3
_MARGIN = 1.1  # Measured times vary.
_UNKNOWN = 1.5  # The cost of a step with proposals relative to one without, until there are measurements.
_ENOUGH, _KEPT = 3, 8  # Measurements: the first ones contain the preparation of kernels.
_RETRY = 256  # Steps without proposals after which their cost is measured again.


class Proposals:
    """The proposals for one sequence. `rate` is the share of the latest proposed tokens that were right."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._places: dict[tuple[int, ...], int] = {}  # The end of the latest occurrence that has a next token.
        self._end = _MATCH  # Of the first run of tokens that is not in `_places`.
        self._latest: list[int] = []
        self._at = 0  # The position of its first token.

    def propose(self, ids: list[int]) -> list[int]:
        """The tokens that may follow `ids`, none or `_MOST`; compares the latest proposal with what did."""
        for proposed, token_id in zip(self._latest, ids[self._at :], strict=False):
            self.rate += (1 - _MEMORY) * ((proposed == token_id) - self.rate)
            if proposed != token_id:
                break
        for end in range(self._end, len(ids)):
            self._places[tuple(ids[end - _MATCH : end])] = end
        self._end = max(self._end, len(ids))
        place = self._places.get(tuple(ids[-_MATCH:]))
        found = [] if place is None else ids[place : place + _MOST]
        self._latest, self._at = (found * _MOST)[:_MOST], len(ids)  # The end of a text may repeat itself.
        return self._latest

    def expected(self, count: int) -> float:
        """How many of `count` proposed tokens are expected to be right: each needs those before it."""
        return sum(self.rate**number for number in range(1, count + 1))


class PromptLookup:
    """See the module. `blocks` are those of the sequences."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._seconds: dict[int, deque[float]] = {}  # Of the latest steps, by their number of rows.
        self._without = 0  # Steps since the latest one with proposals.

    def extend(self, rows: list[Row]) -> list[Row]:
        """The rows of a step without prompts, with the proposals that pay."""
        if len(rows) > _STREAMS or not all(row.count == 1 and row.samples for row in rows):
            return rows
        proposed = [self._proposed(row.sequence) for row in rows]
        total = len(rows) + sum(map(len, proposed))
        while size_below(total) not in (0, total):
            max(proposed, key=len).pop()
            total -= 1
        gain = sum(row.sequence.proposals.expected(len(ids)) for row, ids in zip(rows, proposed, strict=True) if ids)
        if not self._pays(len(rows), total, gain):
            return rows
        return [self._extended(row, ids) if ids else row for row, ids in zip(rows, proposed, strict=True)]

    def observe(self, rows: Rows[Row], seconds: float) -> None:
        """Records the duration of a step without prompts."""
        total = sum([row.count for row in rows])
        is_extended = any(row.proposed for row in rows)
        self._without = 0 if is_extended else self._without + 1
        if self._without > _RETRY:
            self._seconds = {size: times for size, times in self._seconds.items() if size <= _STREAMS}
        if is_extended or total == len(rows) <= _STREAMS:
            size = size_above(total) if is_extended else total
            self._seconds.setdefault(size, deque(maxlen=_KEPT)).append(seconds)

    def _pays(self, streams: int, total: int, gain: float) -> bool:
        without = self._cost(streams)
        if without is None or not gain:
            return False
        extended = self._cost(size_above(total)) or _UNKNOWN * without
        return (streams + gain) * without > _MARGIN * streams * extended

    def _cost(self, size: int) -> float | None:
        """The duration of a step with so many rows, None without enough measurements; interruptions lengthen some."""
        times = self._seconds.get(size, ())
        return min(times) if len(times) >= _ENOUGH else None

    def _proposed(self, sequence: Sequence) -> list[int]:
        """The tokens that a sequence may have at once and that may be right: none of them ends it."""
        if sequence.constraint is not None or sequence.sampling.pace or sequence.alone:
            return []
        if sequence.proposals is None:
            sequence.proposals = Proposals()
        proposed: list[int] = sequence.proposals.propose(sequence.ids)
        if sequence.proposals.rate < _LEAST_RATE:
            return []
        places = (len(sequence.blocks) + self._blocks.free // _STREAMS) * self._blocks.block_tokens
        most = max(0, min(sequence.longest - 1, places) - len(sequence.ids))
        proposed = proposed[:most]
        ends = (number for number, token_id in enumerate(proposed) if token_id in sequence.end_ids)
        return proposed[: next(ends, len(proposed))]

    def _extended(self, row: Row, proposed: list[int]) -> Row:
        blocks = row.sequence.blocks
        while len(blocks) < self._blocks.blocks_for(row.start + 1 + len(proposed)):
            block = self._blocks.take()
            if block is None:
                return row
            blocks.append(block)
        return Row(row.sequence, row.start, 1 + len(proposed), proposed)
