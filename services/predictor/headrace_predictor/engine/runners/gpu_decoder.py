"""The pass of the most common decoders in ten launches a layer: Llama, Mistral, Qwen 2, Qwen 3.

A layer of transformers is some sixty. Queries, keys and values are one product, gate and up too; the model's own
modules keep their weights as views of the joined ones, for tokens that have adapters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headrace_predictor.engine.gpu import HeadNorm, Matrix, Operations
from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.state.attention import Scores


def quantise(model: Any) -> None:
    """Makes the weights of linear layers and embedding the int8 of cpu/formats.py, for `GpuDecoder` only.

    A parameter then has `scales`, float32, one for each row.
    """
    for weight in model.parameters():
        if weight.dim() == 2:
            rows = weight.requires_grad_(False).float()
            # By a tensor: on CUDA torch multiplies by the reciprocal of a number.
            weight.scales = rows.abs().amax(1) / rows.new_full((), 127)
            weight.data = (rows / weight.scales.where(weight.scales > 0, 1.0)[:, None]).round_().to(torch.int8)


def _joined(dtype: torch.dtype, *linears: Any) -> Matrix:
    """The weights and biases of layers with one input, one below the other; those of floats in `dtype`."""
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases).detach().to(dtype) if biases else None
    joined = (torch.cat(weights) if len(weights) > 1 else weights[0]).detach()
    is_int8 = joined.dtype == torch.int8
    if is_int8 or joined.dtype == dtype:
        for weight, part in zip(weights, torch.split(joined, [len(weight) for weight in weights]), strict=True):
            weight.data = part
    if is_int8:
        return Matrix(joined, bias, torch.cat([weight.scales for weight in weights]))
    return Matrix(joined.to(dtype), bias)


def _norm(module: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = module.weight.detach().to(dtype)  # In another dtype it would be several launches.
    return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.variance_epsilon)


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.project = _joined(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(dtype, feed_forward.gate_proj, feed_forward.up_proj)
        self.output, self.down = _joined(dtype, attention.o_proj), _joined(dtype, feed_forward.down_proj)
        self.norm = _norm(layer.input_layernorm, dtype)
        self.second_norm = _norm(layer.post_attention_layernorm, dtype)
        self.head_norm: HeadNorm | None = None
        if hasattr(attention, "q_norm"):
            weights = torch.stack((attention.q_norm.weight.detach(), attention.k_norm.weight.detach()))
            self.head_norm = weights, attention.q_norm.variance_epsilon
        self.number: int = attention.layer_idx
        self.scores, self.reach = Scores(attention.scaling), attention.reach


class GpuDecoder:
    """The forward pass of a paged model that `unlike_gated` allows, with `operations`; after `find_reaches`.

    `dtype` is the model's, unless its numbers are to be wider.
    """

    def __init__(self, model: Any, operations: Operations, dtype: torch.dtype) -> None:
        decoder = model.model
        self._operations = operations
        self._dtype = dtype
        self._rotary = decoder.rotary_emb
        self._layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self._norm = _norm(decoder.norm, dtype)
        self._embedding: Any = decoder.embed_tokens.weight
        self._head = _joined(dtype, model.lm_head)
        if self._embedding.is_cuda:
            torch.cuda.empty_cache()  # The weights that were joined.

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        ours = self._operations
        hidden = torch.embedding(self._embedding, ids[0])
        if hidden.dtype == torch.int8:
            hidden = hidden * self._embedding.scales[ids[0], None]
        hidden = hidden.to(self._dtype)
        cosines, sines = self._rotary(hidden, position_ids=positions)
        for layer in self._layers:
            keys, values = plan.cache.keys[layer.number], plan.cache.values[layer.number]
            tokens = plan.tokens(layer.reach)
            packed = ours.linear(layer.norm(hidden), layer.project, None)
            queries = ours.turn_and_store(packed, (cosines[0], sines[0]), layer.head_norm, keys, values, tokens)
            attended = ours.attend(queries, keys, values, tokens, layer.scores).flatten(1)
            hidden = ours.linear(attended, layer.output, hidden)
            both = ours.linear(layer.second_norm(hidden), layer.gate_up, None)
            hidden = ours.linear(ours.gate(both), layer.down, hidden)
        return ours.linear(self._norm(hidden if places is None else hidden[places]), self._head, None)
