"""Slots for the states of sequences: the rows of tensors that a pass reads and writes where they lie.

A pass takes the first slots, so what it computes together is moved there if it is elsewhere: one row when a sequence
comes or goes, nothing while the same sequences decode. A slot is free when nothing refers to its `State` any more.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor

_FIRST_SLOTS = 4


class State:
    """A sequence's states: `slot` has those after its first `done` ids; it loses them when `done` becomes 0."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.done = 0


class Slots:
    """`tensors` [slots, …] grow with the number of sequences, to `most` slots; `like` are tensors [1, …].

    Beyond `most` a state that is not in `kept` loses its slot. For one thread.
    """

    most = 256

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.tensors = [tensor.new_zeros((_FIRST_SLOTS, *tensor.shape[1:])) for tensor in like]
        self.kept: set[State | None] = set()
        self._owners: list[weakref.ref[State] | None] = [None] * _FIRST_SLOTS

    def take(self) -> State:
        """A free slot, whose contents are those of an earlier sequence."""
        owners = [self._owner(slot) for slot in range(len(self._owners))]
        free = next((slot for slot, owner in enumerate(owners) if owner is None), None)
        if free is None and len(owners) >= self.most:
            free = next((slot for slot, owner in enumerate(owners) if owner not in self.kept), None)
            if free is not None and (loser := owners[free]) is not None:
                loser.done = 0
        if free is None:
            free = len(owners)
            size = min(2 * free, max(self.most, free + 1))
            for number, tensor in enumerate(self.tensors):  # One after the other: both sizes take memory meanwhile.
                self.tensors[number] = _longer(tensor, size)
            self._owners += [None] * (size - free)
        state = State(free)
        self._owners[free] = weakref.ref(state)
        return state

    def gather(self, states: Sequence[State]) -> None:
        """Moves states to the first slots, in any order."""
        count = len(states)
        chosen = {state.slot for state in states}
        targets = (slot for slot in range(count) if slot not in chosen)
        for state in states:
            if state.slot >= count:
                self._exchange(state, next(targets))

    def view(self, first: int, count: int) -> list[Tensor]:
        """The states in neighbouring slots, where they lie."""
        return [tensor[first : first + count] for tensor in self.tensors]

    def write(self, first: int, states: Sequence[Tensor]) -> None:
        """Stores states [rows, …], unless they are written where they lie already."""
        for tensor, state in zip(self.tensors, states, strict=True):
            place = tensor[first : first + len(state)]
            if place.data_ptr() != state.data_ptr():
                place.copy_(state)

    def _exchange(self, state: State, target: int) -> None:
        source, other = state.slot, self._owner(target)
        # All memory that it needs, before anything is changed.
        moved = [tensor[target].clone() for tensor in self.tensors] if other is not None else []
        for tensor in self.tensors:
            tensor[target] = tensor[source]
        for tensor, contents in zip(self.tensors, moved, strict=False):
            tensor[source] = contents
        state.slot = target
        self._owners[source], self._owners[target] = self._owners[target], self._owners[source]
        if other is not None:
            other.slot = source

    def _owner(self, slot: int) -> State | None:
        owner = self._owners[slot]
        return None if owner is None else owner()


def _longer(tensor: Tensor, size: int) -> Tensor:
    larger = tensor.new_zeros((size, *tensor.shape[1:]))
    larger[: len(tensor)] = tensor
    return larger
