"""Runs encoder-decoder models of transformers that take an attention function: all rows that decode pass together.

The encoder is the model's own, for one prompt at a time. So is the decoder, over [rows, 1] ids, or over [1, ids] where
a row has several. Only attention and positions differ: each row attends to its own sequence's blocks (ragged.py), and a
module that embeds positions is called for each row with that row's number of earlier ids. In the pass that follows the
encoder, the layers compute the prompt's keys and values for cross-attention. `proof.py` verifies at load that this is
right for the model.
"""

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headrace_predictor.engine.runners.ragged import (
    RaggedRunner,
    Range,
    decoder_ids,
    prompt_places,
    ranges_of,
    relative_biases,
)
from headrace_predictor.engine.state.cache import CacheShape
from headrace_predictor.engine.state.sequence import Row

NAME = "headrace_encoder_decoder"
_PAST = "past_key_values_length"


class EncoderDecoderRunner(RaggedRunner):
    """See the module."""

    description = "encoder-decoder"

    def __init__(self, model: Any, shape: CacheShape, blocks: int) -> None:
        """Raises ValueError for a model whose experts take a limited share of a pass's tokens."""
        if getattr(model.config, "moe_eval_capacity_token_fraction", 1.0) < 1:
            raise ValueError("its experts leave out tokens, others in another crowd")
        super().__init__(model, shape, blocks)
        self._decoder = model.get_decoder()
        self._takes_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters
        self._positional = [
            (module, inspect.signature(module.forward))
            for module in self._decoder.children()
            if _PAST in inspect.signature(module.forward).parameters
        ]
        parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._configs: list[Any] = [*{id(part.config): part.config for part in parts}.values()]
        self._own_attention = [config._attn_implementation for config in self._configs]
        self._biases = relative_biases(self._decoder) if hasattr(self._decoder, "block") else []
        self._prompt: Range | None = None
        self._outputs: Range | None = None
        self._places: tuple[Tensor, Tensor] | None = None  # Of the prompt whose keys a pass computes.
        self._from_encoder = torch.empty((1, shape.heads, 0, shape.head_size), dtype=model.dtype, device=model.device)
        self._memory = self._make_memory(shape.layers)
        self._nothing = self._encode([0])  # Where layers read the prompt's keys from the blocks.

    def run(self, rows: Rows[Row]) -> Tensor:
        logits: dict[Row, Tensor] = {}
        decodes = [row for row in rows if row.start and row.count == 1]
        if decodes:
            logits.update(zip(decodes, self._decode(decodes), strict=True))
        for row in rows:
            if row.start == 0:
                logits[row] = self._begin(row)
            elif row not in logits:
                logits[row] = self._decode([row])[0]
        sampled = [logits[row] for row in rows if row.samples]
        return torch.stack(sampled) if sampled else torch.empty(0)

    def _encode(self, prompt: list[int]) -> Any:
        return self._model.get_encoder()(input_ids=self._tensor(np.array([prompt])), return_dict=True)

    def _begin(self, row: Row) -> Tensor:
        """Encodes a prompt, and computes what follows it."""
        sequence = row.sequence
        encoded = self._encode(sequence.input_ids)
        blocks, offsets = prompt_places(sequence)
        self._memory.is_updated = {}
        self._places = self._tensor(blocks), self._tensor(offsets)
        try:
            return self._decode([row], encoded)[0]
        finally:
            self._places = None
            # Layers mark themselves one by one: after a pass that failed between them, none may wait for a prompt.
            self._memory.is_updated = dict.fromkeys(range(self._cache.shape.layers), True)

    def _decode(self, rows: Rows[Row], encoded: Any = None) -> Tensor:
        """The last logits [rows, vocabulary] of rows with as many ids each for the decoder."""
        self._prompt, self._outputs = ranges_of(self._cache, rows)
        ids = [decoder_ids(row) for row in rows]
        earlier = [max(0, row.start - len(row.sequence.input_ids)) for row in rows]
        positions = {}
        if self._takes_positions:
            numbers = np.array(earlier)[:, None] + np.arange(len(ids[0]))
            positions = {"decoder_position_ids": self._tensor(numbers)}
        with self._attending(earlier):
            output = self._model(
                encoder_outputs=encoded or self._nothing,
                decoder_input_ids=self._tensor(np.array(ids)),
                past_key_values=self._memory,
                use_cache=True,
                **positions,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    @contextmanager
    def _attending(self, earlier: list[int]) -> Iterator[None]:
        """Lets the decoder attend to blocks, in rows that follow so many ids."""
        for module, signature in self._positional:
            module.forward = partial(_by_row, module.forward, signature, earlier)
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            for config, own in zip(self._configs, self._own_attention, strict=True):
                config._attn_implementation_internal = own
            for module, _ in self._positional:
                del module.forward

    def _make_memory(self, layers: int) -> Any:
        """A cache that keeps nothing itself."""
        memory: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for cache, keep in ((memory.self_attention_cache, _as_they_are), (memory.cross_attention_cache, self._keep)):
            cache.layers = [DynamicLayer() for _ in range(layers)]  # type: ignore[no-untyped-call]
            for number, layer in enumerate(cache.layers):
                layer.update = partial(keep, number)
                layer.keys = layer.values = self._from_encoder
        for module in self._decoder.modules():
            if hasattr(module, "layer_idx"):
                module.runner = self
        return memory

    def _keep(self, layer: int, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores the keys and values [1, heads, ids, head size] of a prompt."""
        if self._places is None:
            raise ValueError("keys of a prompt in a pass without one")
        self._cache.write(layer, self._places, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        return self._from_encoder, self._from_encoder

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Output [rows, ids, heads x head size] of queries [rows, heads, ids, head size]."""
        if self._prompt is None or self._outputs is None:
            raise ValueError("attention outside of a pass")
        looks_at, written, bias = self._prompt, None, None
        if key is not self._from_encoder:
            looks_at = self._outputs
            written = _tokens(key), _tokens(value)
            bias = self._biases[module.layer_idx] if self._biases else None
            if window:
                firsts = torch.maximum(looks_at.firsts, looks_at.ends - window)
                looks_at = Range(looks_at.table, looks_at.owners, firsts, looks_at.ends)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = self._attention(
            module.layer_idx, looks_at, _tokens(query), written, bias=bias, scale=scale, softcap=softcap
        )
        return output.view(len(query), query.shape[2], -1)


def _as_they_are(_: int, keys: Tensor, values: Tensor, *__: Any, **___: Any) -> tuple[Tensor, Tensor]:
    return keys, values


def _tokens(heads: Tensor) -> Tensor:
    """[rows, heads, ids, head size] as [tokens, heads, head size]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _by_row(forward: Any, signature: inspect.Signature, earlier: list[int], *given: Any, **named: Any) -> Tensor:
    """Embeds the positions [rows, ids, size] of rows that follow so many ids, by calls for one row each."""
    arguments = signature.bind(*given, **named).arguments
    rows = []
    for row, past in enumerate(earlier):
        own = {name: _row_of(value, row) for name, value in arguments.items() if name != "position_ids"}
        embedded: Tensor = forward(**own | {_PAST: past})
        rows.append(embedded.reshape(1, -1, embedded.shape[-1]))
    return torch.cat(rows)


def _row_of(value: Any, row: int) -> Any:
    """A row of a tensor [rows, …], or the shape of one."""
    if isinstance(value, Tensor):
        return value[row : row + 1]
    return (1, *value[1:]) if isinstance(value, tuple) else value


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The interface's, in a decoder."""
    runner: EncoderDecoderRunner = module.runner
    return runner.attend(module, query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(NAME, _attention)
