"""The pass of the most common decoders in ten launches a layer: Llama, Mistral, Qwen 2, Qwen 3.

A layer of transformers is some sixty. Queries, keys and values are one product, gate and up too; the model's own
modules keep their weights as views of the joined ones, for tokens that have adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headrace_predictor.engine.gpu.operations import HeadNorms, Matrix, Scores
from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.runners.streamed import GATED_MODELS, SWISH

if TYPE_CHECKING:
    from headrace_predictor.engine.gpu.kernels import GpuOperations


def quantise(model: Any) -> None:
    """Makes the weights of linear layers and embedding the int8 of cpu/formats.py, for `GpuDecoder` only.

    A parameter then has `scales`, float32, one for each row.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and not hasattr(module.weight, "scales"):  # It may be tied.
            weight = module.weight.requires_grad_(False)
            rows = weight.data.float()
            # By a tensor: on CUDA torch multiplies by the reciprocal of a number.
            weight.scales = rows.abs().amax(1) / rows.new_full((), 127)  # type: ignore[attr-defined]
            divisors = weight.scales.where(weight.scales > 0, 1.0)[:, None]  # type: ignore[attr-defined]
            weight.data = (rows / divisors).round_().to(torch.int8)


def _joined(dtype: torch.dtype, *linears: Any) -> Matrix:
    """The weights and biases of layers with one input, one below the other; those of floats in `dtype`."""
    weights = [linear.weight for linear in linears]
    bias = None if linears[0].bias is None else _below(linear.bias for linear in linears).to(dtype)
    if weights[0].dtype == torch.int8:
        matrix = Matrix(_below(weights), bias, _below(weight.scales for weight in weights))
    else:
        matrix = Matrix(_below(weights).to(dtype), bias)
    if matrix.weight.dtype == weights[0].dtype:
        for weight, part in zip(weights, torch.split(matrix.weight, [len(weight) for weight in weights]), strict=True):
            weight.data = part
    return matrix


def _below(tensors: Any) -> Tensor:
    first, *others = (tensor.detach() for tensor in tensors)
    return torch.cat((first, *others)) if others else first


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.project = _joined(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(dtype, feed_forward.gate_proj, feed_forward.up_proj)
        self.output, self.down = _joined(dtype, attention.o_proj), _joined(dtype, feed_forward.down_proj)
        self.norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.number: int = attention.layer_idx
        self.scores, self.reach = Scores(attention.scaling), attention.reach
        self.head_norms: HeadNorms | None = None
        if getattr(attention, "q_norm", None) is not None:
            weights = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            self.head_norms = HeadNorms(*weights, attention.q_norm.variance_epsilon)


class GpuDecoder:
    """The forward pass of a paged model that `takes` allows, with `operations`; after `find_reaches`.

    `dtype` is the model's, unless its numbers are to be wider.
    """

    def __init__(self, model: Any, operations: GpuOperations, dtype: torch.dtype) -> None:
        decoder = model.model
        self._operations = operations
        self._dtype = dtype
        self._rotary = decoder.rotary_emb
        self._layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self._norms = [layer.norm for layer in self._layers[1:]] + [decoder.norm]
        self._embedding: Any = decoder.embed_tokens.weight
        self._head = _joined(dtype, model.lm_head)
        if self._embedding.is_cuda:
            torch.cuda.empty_cache()  # The weights that were joined.

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether it is exactly of a known class (a subclass may compute something else) and turns whole heads."""
        if type(model) not in GATED_MODELS:
            return False
        turns_all = 2 * len(model.model.rotary_emb.inv_freq) == model.model.layers[0].self_attn.head_dim
        return turns_all and all(isinstance(layer.mlp.act_fn, SWISH) for layer in model.model.layers)

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        ours = self._operations
        hidden = torch.embedding(self._embedding, ids[0])
        if hidden.dtype == torch.int8:
            hidden = hidden * self._embedding.scales[ids[0], None]
        hidden = hidden.to(self._dtype)
        rotary = tuple(part[0] for part in self._rotary(hidden, position_ids=positions))
        first = self._layers[0].norm
        normed = F.rms_norm(hidden, first.weight.shape, first.weight.to(hidden.dtype), first.variance_epsilon)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            keys, values = plan.cache.keys[layer.number], plan.cache.values[layer.number]
            tokens = plan.tokens(layer.reach)
            packed = ours.linear(normed, layer.project)
            queries = ours.turn_and_store(packed, rotary, layer.head_norms, keys, values, tokens)
            added = ours.linear(ours.attend(queries, keys, values, tokens, layer.scores).flatten(1), layer.output)
            hidden, normed = ours.add_norm(hidden, added, layer.second_norm.weight, layer.second_norm.variance_epsilon)
            added = ours.linear(ours.gate(ours.linear(normed, layer.gate_up)), layer.down)
            hidden, normed = ours.add_norm(hidden, added, next_norm.weight, next_norm.variance_epsilon)
        return ours.linear(normed if places is None else normed[places], self._head)
