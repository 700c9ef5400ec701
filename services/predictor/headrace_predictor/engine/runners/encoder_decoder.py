"""Runs encoder-decoder models of transformers that take an attention function: one decoder pass for all rows of a step.

The encoder is the model's own, for all new prompts of like length together. So is the decoder, over [ids, 1] of all
rows: only attention and positions differ. Each id attends to its own sequence's blocks (ragged.py), and a module that
embeds positions is called for each row with that row's number of earlier ids. The layers of the pass that follows the
encoder compute the prompts' keys and values for cross-attention. `proof.py` verifies at load that this is right for the
model.

A prompt is padded to a length that depends on nothing but its own, and always by some ids, so that there is a mask: its
numbers are the same to the last bit, whatever is encoded beside it.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from headrace_predictor.engine.faults import check_numbers
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.memory import stated_context
from headrace_predictor.engine.runners.ragged import (
    RaggedAttention,
    decoder_ids,
    prompt_places,
    ranges_of,
    relative_biases,
)
from headrace_predictor.engine.runners.row import decoder_start
from headrace_predictor.engine.state.attention import Range
from headrace_predictor.engine.state.cache import CacheShape, KeyValueCache
from headrace_predictor.engine.state.sequence import Row, Sequence, detached_sequence

NAME = "headrace_encoder_decoder"
_PAST = "past_key_values_length"
_STEP = 8  # Prompts are padded to multiples of this, long ones to those of a sixteenth to an eighth of their length.
_ENCODED = 4096  # The maximum of ids in a pass of the encoder, with padding; but one prompt at least.


class EncoderDecoderRunner(ModelRunner):
    """See the module. `blocks` is the size of the cache, with the reserved block."""

    description = "encoder-decoder"

    def __init__(self, model: Any, shape: CacheShape, blocks: int) -> None:
        """Raises ValueError for a model whose experts take a limited share of a pass's tokens."""
        if getattr(model.config, "moe_eval_capacity_token_fraction", 1.0) < 1:
            raise ValueError("its experts leave out tokens, others in another crowd")
        self.start_ids = (decoder_start(model),)
        self._model = model
        self._cache = KeyValueCache(shape, blocks, model.device)
        self._attention = RaggedAttention(self._cache)
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
        self._longest = stated_context(model.config.get_text_config(decoder=True))
        self._prompt: Range | None = None
        self._outputs: Range | None = None
        self._places: tuple[Tensor, Tensor] | None = None  # Of the prompts whose keys a pass computes.
        self._from_encoder = torch.empty((1, shape.heads, 0, shape.head_size), dtype=model.dtype, device=model.device)
        self._memory = self._make_memory(shape.layers)
        # Where layers read the prompts' keys from the blocks.
        self._nothing = self._encode([detached_sequence([0])], 1)

    def run(self, rows: Rows[Row]) -> Tensor:
        new = [row.sequence for row in rows if row.start == 0]
        ends = np.cumsum([len(decoder_ids(row)) for row in rows])
        ids = np.concatenate([decoder_ids(row) for row in rows])[:, None]
        # Layers mark themselves one by one, also in a pass that fails between them.
        self._memory.is_updated = {} if new else dict.fromkeys(range(self._cache.shape.layers), True)
        self._places = None
        if new:
            blocks, offsets = zip(*(prompt_places(sequence) for sequence in new), strict=True)
            self._places = self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(offsets))
        encoded = self._encode(new, len(ids)) if new else self._nothing
        sampled = [int(end) - 1 for end, row in zip(ends, rows, strict=True) if row.samples]
        logits = self._decode(rows, ids, ends, encoded, sampled or [0])
        return logits[: len(sampled)]

    def drop_biases(self) -> None:
        """Lets a pass of the model compute no biases of positions, for good: `attend` has its own."""
        for module in self._model.modules():
            if getattr(module, "is_decoder", False) and hasattr(module, "compute_bias"):
                module.compute_bias = lambda *_, **__: self._from_encoder

    def clear(self, blocks: Rows[int]) -> None:
        self._cache.clear(blocks)

    def probe(self) -> None:
        sequence = detached_sequence([0], self.start_ids)
        sequence.blocks = [0]
        check_numbers(self.run([Row(sequence, 0, 2)]))
        sequence.ids.append(0)
        check_numbers(self.run([Row(sequence, 2, 1)]))

    def _encode(self, sequences: Rows[Sequence], rows: int) -> Any:
        """The encoder's output for the prompts, one after the other in so many rows, with zeros at the end.

        Some layers need as many rows of it as the decoder has.
        """
        groups = defaultdict[tuple[int, bool], list[int]](list)
        for number, sequence in enumerate(sequences):
            groups[self._width(len(sequence.input_ids))].append(number)
        own: dict[int, Tensor] = {}
        output: Any = None
        for (width, _), group in groups.items():
            count = max(1, _ENCODED // width)
            for part in (group[i : i + count] for i in range(0, len(group), count)):
                prompts = [sequences[number].input_ids for number in part]
                ids = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts])
                mask = np.arange(width) < np.array([len(prompt) for prompt in prompts])[:, None]
                output = self._model.get_encoder()(
                    input_ids=self._tensor(ids), attention_mask=self._tensor(mask.astype(np.int64)), return_dict=True
                )
                for number, prompt, padded in zip(part, prompts, output.last_hidden_state, strict=True):
                    own[number] = padded[: len(prompt)]
        packed = torch.cat([own[number] for number in range(len(sequences))])
        packed = nn.functional.pad(packed, (0, 0, 0, -len(packed) % rows))
        return type(output)(last_hidden_state=packed.view(rows, -1, packed.shape[-1]))

    def _width(self, length: int) -> tuple[int, bool]:
        """The padded length of a prompt, and whether it is padded; those with an equal value are encoded together."""
        step = max(_STEP, 1 << max(0, length.bit_length() - 4))
        width = (length // step + 1) * step
        if self._longest is not None:
            width = max(length, min(width, self._longest))
        return width, width > length

    def _decode(
        self, rows: Rows[Row], ids: NDArray[Any], ends: NDArray[Any], encoded: Any, wanted: list[int]
    ) -> Tensor:
        """The logits [wanted, vocabulary] of some of the ids [ids, 1] of all rows, which end at `ends`."""
        self._prompt, self._outputs = ranges_of(self._cache, rows)
        earlier = [max(0, row.start - len(row.sequence.input_ids)) for row in rows]
        positions = {}
        if self._takes_positions:
            positions = {"decoder_position_ids": (self._outputs.ends - self._outputs.firsts - 1)[:, None].long()}
        with self._attending(ends.tolist(), earlier, wanted if len(wanted) < len(ids) else None):
            output = self._model(
                encoder_outputs=encoded,
                decoder_input_ids=self._tensor(ids),
                past_key_values=self._memory,
                use_cache=True,
                **positions,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    @contextmanager
    def _attending(self, ends: list[int], earlier: list[int], wanted: list[int] | None) -> Iterator[None]:
        """Lets the decoder attend to blocks, in rows that end at `ends` and follow so many ids."""
        handle = None
        if wanted is not None:  # The logits of all ids may take far more memory than their keys and values.
            head = self._model.get_output_embeddings()
            handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][wanted],))
        for module, signature in self._positional:
            module.forward = partial(_by_row, module.forward, signature, ends, earlier)
        for config in self._configs:
            config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            for config, own in zip(self._configs, self._own_attention, strict=True):
                config._attn_implementation_internal = own
            for module, _ in self._positional:
                del module.forward
            if handle is not None:
                handle.remove()

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
        """Stores the keys and values [rows, heads, ids, head size] of prompts, with padding behind the last."""
        if self._places is None:
            raise ValueError("keys of a prompt in a pass without one")
        count = len(self._places[0])
        self._cache.write(layer, self._places, _tokens(keys)[:count], _tokens(values)[:count])
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
        """Output [ids, 1, heads x head size] of queries [ids, heads, 1, head size]."""
        if self._prompt is None or self._outputs is None:
            raise ValueError("attention outside of a pass")
        looks_at, written, bias = self._prompt, None, None
        if key is not self._from_encoder:
            looks_at = self._outputs
            written = key.squeeze(2), value.squeeze(2)
            bias = self._biases[module.layer_idx] if self._biases else None
            if window:
                firsts = torch.maximum(looks_at.firsts, looks_at.ends - window)
                looks_at = Range(looks_at.table, looks_at.owners, firsts, looks_at.ends)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = self._attention(
            module.layer_idx, looks_at, query.squeeze(2), written, bias=bias, scale=scale, softcap=softcap
        )
        return output.unsqueeze(1)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._cache.device)


def _as_they_are(_: int, keys: Tensor, values: Tensor, *__: Any, **___: Any) -> tuple[Tensor, Tensor]:
    return keys, values


def _tokens(heads: Tensor) -> Tensor:
    """[rows, heads, ids, head size] as [tokens, heads, head size]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _by_row(
    forward: Any, signature: inspect.Signature, ends: list[int], earlier: list[int], *given: Any, **named: Any
) -> Tensor:
    """Embeds the positions [ids, 1, size] of rows that end at `ends` and follow so many ids, by a call for each row."""
    arguments = signature.bind(*given, **named).arguments
    rows, begin = [], 0
    for end, past in zip(ends, earlier, strict=True):
        own = {name: _part(value, begin, end) for name, value in arguments.items() if name != "position_ids"}
        embedded: Tensor = forward(**own | {_PAST: past})
        rows.append(embedded.reshape(end - begin, 1, embedded.shape[-1]))
        begin = end
    return torch.cat(rows)


def _part(value: Any, begin: int, end: int) -> Any:
    """Some ids of a tensor [ids, 1, …] as one row, or the shape of one."""
    if isinstance(value, Tensor):
        return value[begin:end].transpose(0, 1)
    return (1, end - begin) if isinstance(value, tuple) else value


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
