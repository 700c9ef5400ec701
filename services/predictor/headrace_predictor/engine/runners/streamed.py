"""The forward pass of gated decoders whose weights are streamed: see cpu/decode.py and cpu/formats.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.cpu import decode
from headrace_predictor.engine.cpu.attention import parts
from headrace_predictor.engine.cpu.formats import MARKERS, Format, Packed, pack, panel_bytes
from headrace_predictor.engine.cpu.products import BLOCK, GROUP
from headrace_predictor.engine.cpu.team import Team
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.runners.step_plan import StepPlan
from headrace_predictor.engine.state.cache import Array

_FEW_TOKENS = 8  # Their heads are divided among threads.


class StreamedDecoder:
    """Logits of a decoder, whose own weights it replaces."""

    def __init__(self, model: Any, format_: Format, threads: int) -> None:
        decoder = model.model
        self._format = format_
        self._rotary = decoder.rotary_emb
        self._kept: list[Any] = []  # What the addresses in the layers point to.
        self._reaches: list[Reach] = []
        first = decoder.layers[0].self_attn
        self._heads = first.q_proj.out_features // first.head_dim
        self._key_heads = first.k_proj.out_features // first.head_dim
        self._head_size: int = first.head_dim
        self._size: int = decoder.embed_tokens.weight.shape[1]
        self._inner: int = decoder.layers[0].mlp.up_proj.out_features
        self._vocabulary: int = model.lm_head.out_features
        self._layers = np.zeros((len(decoder.layers) + 1, decode.LAYER_NUMBERS), np.int64)
        for numbers, layer in zip(self._layers, decoder.layers, strict=False):
            self._set_layer(numbers, layer)
        tied = model.lm_head.weight is decoder.embed_tokens.weight
        head = pack(format_, model.lm_head.weight.detach())
        self._embedding = head if tied else pack(format_, decoder.embed_tokens.weight.detach())
        self._set_product(self._layers[-1], decode.QKV, head, None)
        self._layers[-1][decode.FIRST_NORM] = self._address(decoder.norm.weight)
        sizes = np.array([self._size, self._heads, self._key_heads, self._head_size, threads], np.int64)
        numbers = np.array([decoder.norm.variance_epsilon, first.scaling], np.float32)
        self._model = (self._layers, sizes, numbers, MARKERS[format_])
        self._team = Team(threads, len(decoder.layers))

    def _set_layer(self, numbers: Array, layer: Any) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        weights = [linear.weight.detach() for linear in linears]
        bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        self._set_product(numbers, decode.QKV, pack(self._format, *weights), bias)
        for at, linear in ((decode.OUTPUT, attention.o_proj), (decode.DOWN, feed_forward.down_proj)):
            self._set_product(numbers, at, pack(self._format, linear.weight.detach()), linear.bias)
        gate_up = pack(
            self._format, feed_forward.gate_proj.weight.detach(), feed_forward.up_proj.weight.detach(), interleave=True
        )
        self._set_product(numbers, decode.GATE_UP, gate_up, None)
        numbers[decode.GATE_UP + decode.OUTPUTS] = feed_forward.up_proj.out_features
        numbers[decode.FIRST_NORM] = self._address(layer.input_layernorm.weight)
        numbers[decode.SECOND_NORM] = self._address(layer.post_attention_layernorm.weight)
        for at, name in ((decode.QUERY_NORM, "q_norm"), (decode.KEY_NORM, "k_norm")):
            norm = getattr(attention, name, None)
            numbers[at] = 0 if norm is None else self._address(norm.weight)
        numbers[decode.LAYER] = attention.layer_idx
        if attention.reach not in self._reaches:
            self._reaches.append(attention.reach)
        numbers[decode.REACH] = self._reaches.index(attention.reach)

    def _set_product(self, numbers: Array, at: int, packed: Packed, bias: Tensor | None) -> None:
        self._kept.append(packed)
        numbers[at : at + 8] = [
            packed.weights.ctypes.data,
            packed.scales.ctypes.data if len(packed.scales) else 0,
            0 if bias is None else self._address(bias),
            packed.panels,
            packed.blocks,
            panel_bytes(packed.format, packed.inputs),
            packed.outputs,
            packed.inputs,
        ]

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(own := tensor.detach().float().contiguous())
        return own.data_ptr()

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        hidden = self._embedding.rows(ids[0])
        cosines, sines = (part[0].contiguous() for part in self._rotary(hidden, position_ids=positions))
        tokens = len(hidden)
        if places is None:
            places = torch.arange(tokens)
        logits = torch.empty(len(places), self._vocabulary)
        widest = -(-max(self._size, self._inner, self._heads * self._head_size) // BLOCK)
        heads = self._heads + 2 * self._key_heads
        owners = plan.owners.numpy()
        partition = parts(owners, self._heads, self._key_heads, tokens <= _FEW_TOKENS)
        parameters = np.zeros(decode.FIRSTS + decode.REACHES, np.int64)
        buffers = {
            decode.HIDDEN: hidden,
            decode.PACKED: torch.empty(tokens, heads * self._head_size),
            decode.ATTENDED: torch.empty(tokens, self._heads * self._head_size),
            decode.INNER: torch.empty(tokens, self._inner),
            decode.INPUTS: torch.empty(tokens, 2 * BLOCK * widest, dtype=torch.uint8),
            decode.SCALES: torch.empty(tokens, widest),
            decode.SUMS: torch.empty(tokens, widest * BLOCK // GROUP, dtype=torch.int32),
            decode.COSINES: cosines,
            decode.SINES: sines,
            decode.TABLE: plan.table,
            decode.OWNERS: plan.owners,
            decode.ENDS: plan.ends,
            decode.PLACES: places,
            decode.LOGITS: logits,
        } | {decode.FIRSTS + i: plan.firsts(reach).int() for i, reach in enumerate(self._reaches)}
        for at, tensor in buffers.items():
            parameters[at] = tensor.data_ptr()
        parameters[decode.PARTITION] = partition.ctypes.data
        parameters[: decode.WIDTH + 1] = [tokens, len(places), len(partition), *plan.table.shape]
        cache = plan.cache.arrays[0]
        with self._team.awake((*self._model, cache.keys, cache.values)):
            self._team.run(decode.DECODER, parameters)
        return logits
