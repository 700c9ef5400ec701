"""Rotary positions for tokens of many sequences in one row.

Where factors depend on the length of a sequence, transformers derives them from the largest position of a forward pass.
Here the model's own rotary module runs once for each stage (`Scaling`) in the row, with a further position that is the
stage's last. Used only by the engine's thread.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from headrace_predictor.engine.cpu.angles import cosines_and_sines, inverse_frequencies, scaled
from headrace_predictor.engine.state.cache import Array
from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.engine.state.sequence import Row

_ROWS_AT_ONCE = 1024  # Of the table of angles; they take some 20 ms.

_Rotary = Callable[..., Any]


class SequenceRotary:
    """Replaces the forward pass of rotary modules; outside of `packed`, a pass has one sequence, from its beginning."""

    def __init__(self, model: Any, modules: Rows[Any]) -> None:
        self._modules = modules
        self._device = model.device
        self._stages: Tensor | None = None  # Of each token of the row [T].
        limits, grows = self._limits()
        self._recomputes = not grows and model.can_generate() and _recomputes(model, limits[0])
        for module in modules:
            module.forward = partial(self._forward, module.forward, _grows(module))

    @classmethod
    def of(cls, model: Any, context: int) -> "SequenceRotary | None":
        """For a model whose factors change within the context; else None, and the model is unchanged."""
        modules = [module for module in model.modules() if _limits(module)]
        changes = any(limit < context for module in modules for limit in _limits(module))
        return cls(model, modules) if changes else None

    @property
    def scaling(self) -> Scaling:
        return Scaling(*self._limits(), self._recomputes)

    @contextmanager
    def packed(self, rows: Rows[Row]) -> Iterator[None]:
        """During the block, a pass has the tokens of rows, and perhaps others behind them."""
        scaling = self.scaling
        stages: list[int] = []
        for row in rows:
            base = scaling.base(len(row.sequence.input_ids), len(row.sequence.ids))
            stages += [max(base, scaling.stage(end)) for end in range(row.start + 1, row.start + row.count + 1)]
        self._stages = torch.tensor(stages, device=self._device)
        try:
            yield
        finally:
            self._stages = None

    def _limits(self) -> tuple[tuple[int, ...], bool]:
        limits = {limit for module in self._modules for limit in _limits(module)}
        return tuple(sorted(limits)), any(map(_grows, self._modules))

    def _forward(
        self, forward: _Rotary, grows: bool, x: Tensor, position_ids: Tensor, *layer: str, **others: Any
    ) -> Any:
        def run(positions: Tensor) -> Any:
            if grows:
                forward(x, torch.zeros_like(positions[..., :1]), *layer, **others)  # It remembers the longest length.
            return forward(x, positions, *layer, **others)

        if self._stages is None:
            return run(position_ids)
        stages = torch.nn.functional.pad(self._stages, (0, position_ids.shape[-1] - len(self._stages)))
        distinct = sorted(set(stages.tolist()))
        if distinct == [0]:
            return run(position_ids)
        whole: Any = None
        for stage in distinct:
            chosen = (stages == stage).nonzero()[:, 0]
            positions = position_ids[..., chosen]
            if stage:
                positions = torch.cat((positions, torch.full_like(positions[..., :1], stage - 1)), dim=-1)
            made = run(positions)
            parts = made if isinstance(made, tuple) else (made,)
            if whole is None:
                whole = [part.new_empty((part.shape[0], len(stages), *part.shape[2:])) for part in parts]
            for target, part in zip(whole, parts, strict=True):
                target[:, chosen] = part[:, : len(chosen)]
        return tuple(whole) if isinstance(made, tuple) else whole[0]


def _types(module: Any) -> dict[str | None, str]:
    """The kinds of a rotary module's scalings, by type of layer where it has several."""
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def _grows(module: Any) -> bool:
    return any("dynamic" in kind for kind in _types(module).values())


def _limits(module: Any) -> list[int]:
    """The lengths beyond which the module's factors change."""
    limits = []
    for layer, kind in _types(module).items():
        parameters = module.config.rope_parameters
        if kind == "longrope":
            limits.append((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(module.original_max_seq_len)
    return limits


def _recomputes(model: Any, limit: int) -> bool:
    """Whether `generate` discards a cache of `limit` tokens when the next one comes."""
    cache = DynamicCache(config=model.config)
    cache.get_seq_length = lambda layer_idx=0: limit  # type: ignore[method-assign]
    ids = torch.zeros((1, limit + 1), dtype=torch.long, device=model.device)
    inputs = model.prepare_inputs_for_generation(ids, past_key_values=cache, attention_mask=torch.ones_like(ids))
    return inputs.get("past_key_values") is None


class RotaryAngles:
    """Cosines and sines [T, head size] of a rotary module: from a table that grows, or its own if its factors change.

    `origin` tells what computed them, if that may differ from machine to machine.
    """

    def __init__(self, rotary: Any, size: int) -> None:
        self._rotary, self._size, self._made = rotary, size, 0
        self._table = torch.empty(2, 0, size)
        parameters = rotary.config.rope_parameters
        frequencies = scaled(inverse_frequencies(parameters["rope_theta"], size), parameters)
        self._frequencies: Array | None = frequencies
        self.origin = ""
        if frequencies is None:
            self._frequencies = rotary.inv_freq.float().numpy() if rotary.rope_type == "yarn" else None
            self.origin = f" {rotary.rope_type} {torch.backends.cpu.get_cpu_capability()}"

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._frequencies is None:
            cosines, sines = (part[0].float().contiguous() for part in self._rotary(hidden, position_ids=positions))
            return cosines, sines
        if (end := int(positions.max()) + 1) > self._made:
            self._make(end, self._frequencies)
        cosines, sines = (part[positions[0]] for part in self._table)
        return cosines, sines

    def _make(self, end: int, frequencies: Array) -> None:
        """Computes some more rows than up to `end`: all at once would hold up every stream."""
        end = -(-end // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        if end > self._table.shape[1]:
            larger = torch.empty(2, 2 * end, self._size)  # What is not written takes no memory.
            larger[:, : self._made] = self._table[:, : self._made]
            self._table = larger
        halves = cosines_and_sines(np.arange(self._made, end), frequencies, self._rotary.attention_scaling)
        for table, half in zip(self._table, halves, strict=True):
            table[self._made : end] = torch.from_numpy(np.concatenate([half, half], 1))
        self._made = end
