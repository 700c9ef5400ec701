"""The recurrent states of transformers' models (Mamba, gated delta rule, convolutions, RWKV) as flat lists of tensors.

A state is a list of tensors [rows, …], in an order that is the model's own: what a pass reads, and what it leaves for
the next id of each row. `recurrent_states` finds where a model keeps them. A pass may write to the tensors that it is
given.

The states of sequences lie in slots, the rows of tensors that a pass reads and writes where they lie. A pass takes the
first slots, so what it computes together is moved there if it is elsewhere: one row when a sequence comes or goes,
nothing while the same sequences decode. A slot is free when nothing refers to its `State` any more. Slots that no
sequence needs have copies of the states at the end of prefixes.
"""

import inspect
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.models.minimax import MiniMaxForCausalLM
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.recurrent_gemma import RecurrentGemmaForCausalLM
from transformers.models.rwkv import RwkvForCausalLM

from headrace_predictor.engine.runners.unread import as_zeros

_FIRST_SLOTS = 4
KeepKeys = Callable[..., tuple[Tensor, Tensor]]  # Of a layer's number, keys and values; gives what is attended to.


class States(ABC):
    """Where a model keeps its states.

    `attention_layers` are the numbers of those layers that store keys, in `cache`.
    """

    attention_layers: tuple[int, ...] = ()
    cache: Any = None

    @abstractmethod
    def begin(self, states: list[Tensor] | None) -> dict[str, Any]:
        """The arguments of a forward pass that continues from states; None: of new sequences."""

    @abstractmethod
    def end(self, output: Any) -> list[Tensor]:
        """The states that a pass has left."""

    def keep_keys(self, keep: KeepKeys) -> None:
        """Lets `keep` store the keys and values of attention layers."""
        for number in self.attention_layers:
            self.cache.layers[number].update = partial(keep, number)


class _CachedStates(States):
    """Those in transformers' cache, in layers of its own kind."""

    def __init__(self, model: Any) -> None:
        self.cache = DynamicCache(config=model.config)
        takes = inspect.signature(model.forward).parameters
        self._name = "cache_params" if "cache_params" in takes else "past_key_values"
        layers = list(enumerate(self.cache.layers))
        self.attention_layers = tuple(number for number, layer in layers if isinstance(layer, CacheLayerMixin))
        self._layers: list[Any] = [layer for _, layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._places: list[tuple[dict[int, Tensor], dict[int, bool], int]] = []

    def begin(self, states: list[Tensor] | None) -> dict[str, Any]:
        for layer in self._layers:
            for number in range(layer.number_of_states):
                layer.is_conv_states_initialized[number] = layer.is_recurrent_states_initialized[number] = False
                layer.has_previous_state[number] = states is not None
        for (held, is_held, number), state in zip(self._places, states or (), strict=states is not None):
            held[number], is_held[number] = state, True
        return {self._name: self.cache}

    def end(self, output: Any) -> list[Tensor]:
        if not self._places:
            self._places = [*self._find_places()]
        return [held[number] for held, _, number in self._places]

    def _find_places(self) -> Iterator[tuple[dict[int, Tensor], dict[int, bool], int]]:
        """After a pass: where a layer keeps a tensor, where it keeps whether it does, and the tensor's number."""
        for layer in self._layers:
            for number in range(layer.number_of_states):
                for held, is_held in (
                    (layer.conv_states, layer.is_conv_states_initialized),
                    (layer.recurrent_states, layer.is_recurrent_states_initialized),
                ):
                    if is_held[number]:
                        yield held, is_held, number


class _MiniMaxStates(States):
    """Those in MiniMax's own kind of cache, beside its keys."""

    def __init__(self, model: Any) -> None:
        kinds = model.config.layer_types
        self._linear = [number for number, kind in enumerate(kinds) if kind == "linear_attention"]
        self.attention_layers = tuple(number for number in range(len(kinds)) if number not in self._linear)
        self.cache = MiniMaxCache()  # type: ignore[no-untyped-call]
        self.cache.layers = [DynamicLayer() for _ in kinds]  # type: ignore[no-untyped-call]

    def begin(self, states: list[Tensor] | None) -> dict[str, Any]:
        self.cache.linear_cache = [None] * len(self.cache.layers)
        for number, state in zip(self._linear, states or (), strict=False):
            self.cache.linear_cache[number] = state
        return {"past_key_values": self.cache}

    def end(self, output: Any) -> list[Tensor]:
        return [self.cache.linear_cache[number] for number in self._linear]


class _GriffinStates(_CachedStates):
    """Those that RecurrentGemma's blocks keep as attributes, beside a cache of keys."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._layers = []  # The cache's own stay empty.
        self._blocks = [module for module in model.modules() if hasattr(module, "rg_lru")]

    def begin(self, states: list[Tensor] | None) -> dict[str, Any]:
        left = iter(states or ())
        for block in self._blocks:
            block.conv1d_state, block.rg_lru.recurrent_states = next(left, None), next(left, None)
        return super().begin(None)

    def end(self, output: Any) -> list[Tensor]:
        return [state for block in self._blocks for state in (block.conv1d_state, block.rg_lru.recurrent_states)]


class _RwkvStates(States):
    """Those that RWKV takes and returns."""

    def begin(self, states: list[Tensor] | None) -> dict[str, Any]:
        return {"state": states}

    def end(self, output: Any) -> list[Tensor]:
        return list(output.state)


def recurrent_states(model: Any) -> States | None:
    """Where a model keeps recurrent states; None if it has none."""
    if isinstance(model, RwkvForCausalLM):
        return _RwkvStates()
    if isinstance(model, RecurrentGemmaForCausalLM):
        return _GriffinStates(model)
    if isinstance(model, MiniMaxForCausalLM):
        return _MiniMaxStates(model)
    return None if key_layers(model.config) is None else _CachedStates(model)


def key_layers(config: Any) -> int | None:
    """How many layers of a decoder store keys, if some have recurrent states; None if none has."""
    if config.is_encoder_decoder:
        return None
    layers = DynamicCache(config=config).layers
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return None
    return sum(isinstance(layer, CacheLayerMixin) for layer in layers)


def first_states(model: Any, states: States) -> list[Tensor]:
    """The states [1, …] after a first id."""
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with as_zeros(model):
        return states.end(model(input_ids=ids, use_cache=True, **states.begin(None)))


def state_bytes(model: Any) -> int:
    """The bytes of one sequence's states."""
    states = recurrent_states(model)
    return 0 if states is None else sum(state.nbytes for state in first_states(model, states))


class State:
    """A sequence's states: `slot` has those after its first `done` ids; it loses them when `done` becomes 0."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.done = 0


class Slots:
    """`tensors` [slots, …] grow with the number of sequences, to `most` slots; `like` are tensors [1, …].

    Beyond `most` the copy that was used least recently loses its slot, then a state that is not in `kept`. `copies` are
    those of prefixes, by the name of the block that ends there. For one thread.
    """

    most = 256

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.tensors = [tensor.new_zeros((_FIRST_SLOTS, *tensor.shape[1:])) for tensor in like]
        self.kept: set[State | None] = set()
        self.copies: OrderedDict[bytes, State] = OrderedDict()
        self._owners: list[weakref.ref[State] | None] = [None] * _FIRST_SLOTS

    def take(self) -> State:
        """A free slot, whose contents are those of an earlier sequence."""
        if self.copies and self._is_full:
            self.copies.popitem(last=False)
        owners = self._all_owners
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

    def keep(self, name: bytes, state: State) -> None:
        """Copies a sequence's states for others, unless sequences have all slots."""
        self.copies.pop(name, None)
        if self.copies or not self._is_full:
            copy = self.take()
            for tensor in self.tensors:
                tensor[copy.slot] = tensor[state.slot]
            copy.done = state.done
            self.copies[name] = copy

    def restore(self, name: bytes) -> State | None:
        """The states that were kept under a name, in a slot of their own."""
        if name not in self.copies:
            return None
        if self._is_full:
            return self.copies.pop(name)
        self.copies.move_to_end(name)
        state, copy = self.take(), self.copies[name]
        for tensor in self.tensors:
            tensor[state.slot] = tensor[copy.slot]
        state.done = copy.done
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

    @property
    def _all_owners(self) -> list[State | None]:
        return [self._owner(slot) for slot in range(len(self._owners))]

    @property
    def _is_full(self) -> bool:
        return len(self._owners) >= self.most and None not in self._all_owners

    def _owner(self, slot: int) -> State | None:
        owner = self._owners[slot]
        return None if owner is None else owner()


def _longer(tensor: Tensor, size: int) -> Tensor:
    larger = tensor.new_zeros((size, *tensor.shape[1:]))
    larger[: len(tensor)] = tensor
    return larger
