"""Runs models with recurrent states, alone or beside attention (Qwen 3.5, Granite 4, Mamba, …): all rows that decode
pass the model together.

A pass is transformers' own, over [rows, 1] ids or over [1, ids] of a chunk of a prompt. The states of sequences lie in
slots (states.py), on which a pass works in place; keys and values of attention layers lie in the sequences' blocks, and
each row attends to its own (attention.py), so that no row is padded to the length of another. Everything else in these
models is computed row by row. `proof.py` verifies at load that this is right for the model.

On the CPU a pass of a prompt ends at each multiple of PREFIX_TOKENS, whatever is cached: in most models the last bits
depend on where prompts are cut. There the states of a prefix can be kept, and a sequence that continues from them has
the bits that it would have without.

While a pass runs, its sequences have no state. If it fails, their ids are computed again from the first on, and so they
are if a step is repeated after its states have advanced.
"""

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from headrace_predictor.engine.cpu.recording import Passes
from headrace_predictor.engine.faults import check_numbers
from headrace_predictor.engine.runners.attention import StepPlanner, paged_attention
from headrace_predictor.engine.runners.interface import ModelRunner, first_row
from headrace_predictor.engine.runners.mamba import quicken
from headrace_predictor.engine.runners.states import Slots, State, first_states, recurrent_states
from headrace_predictor.engine.state.blocks import PREFIX_TOKENS
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache
from headrace_predictor.engine.state.sequence import Row, Sequence

NAME = "headrace_hybrid"
_PIECE = 512  # Ids of a pass that computes a state again: all at once, they could take any memory and time.


class _Pass:
    """The number of the layer whose keys come next in the current pass."""

    layer = 0

    def keep(self, layer: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """In place of a cache's: the attention itself writes them to the blocks."""
        self.layer = layer
        return keys, values


class HybridRunner(ModelRunner):
    """See the module; after `find_reaches`. `blocks` is the size of the cache, with the reserved block.

    With `whole`, prompts are computed in one pass, together with their last chunk: some models cannot continue from
    states with more than one id. Without `together` each row has a pass of its own: some compute wrongly with states of
    several rows.
    """

    def __init__(self, model: Any, shape: CacheShape, blocks: int, whole: bool = False, together: bool = True) -> None:
        """Raises ValueError if the model has no recurrent states."""
        states = recurrent_states(model)
        if states is None:
            raise ValueError("the model has no recurrent states")
        self.reads_whole_prompts = whole
        self.reuses_prefixes = not whole and model.device.type == "cpu"  # A GPU's passes are better long.
        self.description = "hybrid" if together else "one row"
        self.repeats = together  # The passes of rows that decode.
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes
        # The logits of a long prompt's other positions would take far more memory than its keys and values.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._places: list[int] = []  # Addresses of the states that recorded passes know.
        self._states = states
        quicken(model)
        self._pass = _Pass()
        self._cache: KeyValueCache | None = None
        if states.attention_layers:
            self._cache = _cache_of_layers(shape, blocks, model.device, states.attention_layers)
            self._planner = StepPlanner(self._cache)
            states.keep_keys(self._pass.keep)
            for module in model.modules():
                if "reach" in vars(module):
                    module.current_pass = self._pass
            model.set_attn_implementation(NAME)
        with self._attending([first_row()]):
            self._slots = Slots(first_states(model, states))
        self.prefix_states = self._slots.copies

    def limit(self, states: int) -> None:
        """Sets how many sequences have states: beyond that, one that is not in the step is computed again later."""
        self._slots.most = states

    def run(self, rows: Rows[Row]) -> Tensor:
        logits: dict[Row, Tensor] = {}
        decodes = [row for row in rows if self.repeats and row.count == 1 and row.start and _done(row) == row.start]
        self._slots.kept = {row.sequence.state for row in rows}
        # Prompts first: where one fails, the states of the others have not advanced.
        for row in rows:
            if row not in decodes:
                logits[row] = self._prefill(row)
        if decodes:
            logits.update(self._decode(decodes))
        sampled = [logits[row] for row in rows if row.samples]
        return torch.stack(sampled) if sampled else torch.empty(0)

    def clear(self, blocks: Rows[int]) -> None:
        if self._cache is not None:
            self._cache.clear(blocks)

    def probe(self) -> None:
        row = first_row()
        check_numbers(self.run([row]))
        row.sequence.ids.append(0)
        check_numbers(self.run([Row(row.sequence, 1, 1)]))

    def _decode(self, rows: Rows[Row]) -> dict[Row, Tensor]:
        """The logits of rows with one id, computed together."""
        states = [_take_state(row) for row in rows]
        self._slots.gather(states)
        if self._places != (places := [tensor.data_ptr() for tensor in self._slots.tensors]):
            self._places, self.passes = places, self.passes and Passes()
        order = sorted(zip(rows, states, strict=True), key=lambda both: both[1].slot)
        ordered = [row for row, _ in order]
        forward = partial(self._forward, 0, True)
        logits = self._compute(ordered, partial(self.passes.run, len(rows), forward) if self.passes else forward)
        for row, state in order:
            state.done += 1
            row.sequence.state = state
        return dict(zip(ordered, logits, strict=True))

    def _prefill(self, row: Row) -> Tensor:
        """The last logits of a row; nothing for a part of a prompt that a later row computes."""
        sequence, end = row.sequence, row.start + row.count
        state = _take_state(row) if _done(row) in range(1, row.start + 1) else None
        if self.reads_whole_prompts and state is None and end < len(sequence.ids):
            return torch.empty(0)
        if state is None:
            sequence.state = None
            if row.start and row.start % PREFIX_TOKENS == 0:
                state = self._slots.restore(_name(sequence, row.start))
            state = state or self._slots.take()
        logits = torch.empty(0)
        while (start := state.done) < end:
            if self.reads_whole_prompts:
                stop = start + 1 if start else end
            elif self.reuses_prefixes:
                stop = min(end, (start // PREFIX_TOKENS + 1) * PREFIX_TOKENS)
            else:
                stop = min(end, start + max(row.count, _PIECE))
            forward = partial(self._forward, state.slot, start > 0)
            logits = self._compute([Row(sequence, start, stop - start)], forward)
            state.done = stop
            if stop in sequence.borders:
                self._slots.keep(_name(sequence, stop), state)
        sequence.state = state
        return logits[0]

    def _compute(self, rows: Rows[Row], forward: Callable[..., Tensor]) -> Tensor:
        """What `forward` returns for rows with as many ids each."""
        inputs = [self._tensor([row.ids for row in rows])]
        if self._takes_positions:
            inputs.append(self._tensor([[*range(row.start, row.start + row.count)] for row in rows]))
        with self._attending(rows):
            return forward(*inputs)

    def _forward(self, slot: int, continues: bool, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The last logits [rows, vocabulary] of `ids` [rows, …], whose states are from `slot` on."""
        arguments = self._states.begin(self._slots.view(slot, len(ids)) if continues else None)
        if positions is not None:
            arguments["position_ids"] = positions
        output = self._model(input_ids=ids, use_cache=True, **arguments, **self._only_last)
        self._slots.write(slot, self._states.end(output))
        logits: Tensor = output.logits[:, -1]
        return logits

    def _attending(self, rows: Rows[Row]) -> AbstractContextManager[None]:
        return nullcontext() if self._cache is None else self._planner.plan(rows).current()

    def _tensor(self, values: list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self._model.device)


def _name(sequence: Sequence, end: int) -> bytes:
    """The name of a sequence's block that ends there."""
    return sequence.block_names(end // BLOCK_TOKENS, BLOCK_TOKENS)[-1]


def _done(row: Row) -> int:
    """How many ids the state of a row's sequence has seen; 0 without one."""
    state: State | None = row.sequence.state
    return 0 if state is None else state.done


def _take_state(row: Row) -> State:
    """Takes the state from its sequence, until the pass that changes it has succeeded."""
    state: State = row.sequence.state
    row.sequence.state = None
    return state


def _cache_of_layers(shape: CacheShape, blocks: int, device: torch.device, layers: Rows[int]) -> KeyValueCache:
    """A cache for those layers of a model, which finds each by its number in the model."""
    cache = KeyValueCache(shape, blocks, device)
    numbers = [layers.index(layer) if layer in layers else 0 for layer in range(max(layers) + 1)]
    cache.keys, cache.values = ([parts[number] for number in numbers] for parts in (cache.keys, cache.values))
    if device.type == "cpu":
        cache.arrays = [cache.arrays[number] for number in numbers]
    return cache


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Query [rows, heads, ids, head size] to output [rows, ids, heads, head size]; either rows or ids are one."""
    current: _Pass = module.current_pass
    module.layer_idx = current.layer  # Of a module that several layers share.
    if len(query) == 1:
        return paged_attention(module, query, key, value, None, **others)
    query, key, value = (part.transpose(0, 2) for part in (query, key, value))  # All rows in one.
    output, _ = paged_attention(module, query, key, value, None, **others)
    return output.transpose(0, 1), None


AttentionInterface.register(NAME, _attention)
