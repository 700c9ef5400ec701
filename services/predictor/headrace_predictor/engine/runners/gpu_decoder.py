"""The pass of the most common decoders in ten launches a layer: Llama, Mistral, Qwen 2, Qwen 3.

A layer of transformers is some sixty. Queries, keys and values are one product, gate and up too; the model's own
modules keep their weights as views of the joined ones, for tokens that have adapters.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headrace_predictor.engine.gpu.operations import HeadNorms, Operations, Scores
from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.runners.fused_layers import GATED, SWISH
from headrace_predictor.engine.runners.streamed import GATED_MODELS


class Joined:
    """The weights [outputs, inputs] and biases of linear layers with one input, one below the other."""

    def __init__(self, dtype: torch.dtype, *linears: nn.Linear) -> None:
        self.weight = _joined([linear.weight for linear in linears]).to(dtype)
        self.bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears]).to(dtype)
        if dtype == linears[0].weight.dtype:
            parts = torch.split(self.weight, [linear.out_features for linear in linears])
            for linear, weight in zip(linears, parts, strict=True):
                linear.weight.data = weight


def _joined(tensors: list[Any]) -> Tensor:
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])


class _Layer:
    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.project = Joined(dtype, attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = Joined(dtype, feed_forward.gate_proj, feed_forward.up_proj)
        self.output, self.down = Joined(dtype, attention.o_proj), Joined(dtype, feed_forward.down_proj)
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

    def __init__(self, model: Any, operations: Operations, dtype: torch.dtype) -> None:
        decoder = model.model
        self._operations = operations
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._layers = [_Layer(layer, dtype) for layer in decoder.layers]
        self._norms = [layer.norm for layer in self._layers[1:]] + [decoder.norm]
        self._head = Joined(dtype, model.lm_head)
        if self._embedding.is_cuda:
            torch.cuda.empty_cache()  # The weights that were joined.

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether it is exactly of a known class (a subclass may compute something else) and turns whole heads."""
        if type(model) not in GATED_MODELS:
            return False
        turns_all = 2 * len(model.model.rotary_emb.inv_freq) == model.model.layers[0].self_attn.head_dim
        return turns_all and all(
            type(layer) in GATED and isinstance(layer.mlp.act_fn, SWISH) for layer in model.model.layers
        )

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        ours = self._operations
        hidden = torch.embedding(self._embedding, ids[0]).to(self._head.weight.dtype)
        cosines, sines = (part[0] for part in self._rotary(hidden, position_ids=positions))
        first = self._layers[0].norm
        _, normed = ours.add_norm(hidden, None, first.weight, first.variance_epsilon)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            keys, values = plan.cache.keys[layer.number], plan.cache.values[layer.number]
            tokens = plan.tokens(layer.reach)
            packed = ours.linear(normed, layer.project.weight, layer.project.bias)
            queries = ours.turn_and_store(packed, (cosines, sines), layer.head_norms, keys, values, tokens)
            attended = ours.attend(queries, keys, values, tokens, layer.scores).flatten(1)
            added = ours.linear(attended, layer.output.weight, layer.output.bias)
            hidden, normed = ours.add_norm(hidden, added, layer.second_norm.weight, layer.second_norm.variance_epsilon)
            inner = ours.gate(ours.linear(normed, layer.gate_up.weight, layer.gate_up.bias))
            added = ours.linear(inner, layer.down.weight, layer.down.bias)
            hidden, normed = ours.add_norm(hidden, added, next_norm.weight, next_norm.variance_epsilon)
        return ours.linear(normed if places is None else normed[places], self._head.weight, self._head.bias)
