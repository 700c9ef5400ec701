"""Decoder layers of the most common kinds in few operations, for the CPU. float32 and bfloat16.

A layer of transformers is some forty small operations, and for a few rows the calls take most of the time. Here
queries, keys and values are one product; rotation, writing to the cache and attention are one kernel; activations and
residual sums are fused into the products. The result is the same except for rounding: transformers rounds intermediate
results to bfloat16, this code does not.

For tokens that have an adapter (LoRA), its products are added to those of the fused layer, and a fused activation is
computed again. So the other tokens have the same numbers as in a step without adapters.

The rest of the model is transformers' own, or that of `FlatDecoder`. Layers are recognised by their class; other
classes, and unsupported configurations, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from headrace_predictor.engine.adapters import LowRank, LowRankWeights, Part
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.kernel import Buffer
from headrace_predictor.engine.cpu.packed_linear import PackedLinear, packs
from headrace_predictor.engine.runners.attention import StepPlan, current_plan
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.state.cache import Array, array_of

GATED = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
SWISH = (nn.SiLU, SiLUActivation)


class Workspace(NamedTuple):
    """What the layers of a model share in a step. A buffer is read by the next product, before it is written again."""

    rotary: tuple[Array, Array]  # Cosines and sines [T, head size].
    normed: Buffer  # [T, model size]
    attended: Buffer  # [T, query heads, head size]


class AttentionProducts(NamedTuple):
    """What an adapter adds in an attention: to queries, keys and values, which are one output, and after it."""

    projections: LowRank | None
    output: LowRank | None


class GatedProducts(NamedTuple):
    """What an adapter adds in a layer of gated feed-forward; the outputs of gate and up are one."""

    attention: AttentionProducts
    has_gate: bool
    gate_up: LowRank | None
    down: LowRank | None


class OPTProducts(NamedTuple):
    """What an adapter adds in OPT's layer."""

    attention: AttentionProducts
    first: LowRank | None
    second: LowRank | None


class _Attention:
    """Attention over the cache, from normed hidden states to the heads' outputs, before the output layer."""

    def __init__(self, attention: Any, scale: float) -> None:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._project = PackedLinear.of(*projections)
        self._sizes = [projection.out_features for projection in projections]
        self._layer: int = attention.layer_idx
        self._size: int = attention.head_dim
        self._query_heads: int = attention.q_proj.out_features // self._size
        self._key_heads: int = attention.k_proj.out_features // self._size
        self._reach: Reach = attention.reach
        self._attend = kernel.Attention(self._query_heads, scale)
        # Qwen3 norms each query head and each key head.
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._head_norms = [kernel.RmsNorm(norm) for norm in norms if norm is not None]

    def output(self, hidden: Tensor) -> Buffer:
        """A buffer for the output for hidden states [T, model size]."""
        return Buffer((len(hidden), self._query_heads, self._size), hidden.dtype)

    def products(self, weights: Mapping[str, LowRankWeights], output: str, packed: bool) -> AttentionProducts:
        """An adapter's, from its weights by path in the layer; `output` is the output layer's name."""
        parts = [weights.get(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj")]
        return AttentionProducts(
            LowRank.joined(parts, self._sizes, packed), _product(weights, f"self_attn.{output}", packed)
        )

    def __call__(
        self,
        normed: Tensor,
        plan: StepPlan,
        output: Buffer,
        rotary: tuple[Array, Array] | None = None,
        added: Sequence[Part] = (),
    ) -> Tensor:
        """Hidden states [T, model size] to [T, query heads x head size]; `rotary` as in `Workspace`."""
        packed = self._project.forward(normed)
        for part in added:
            part.add(normed, packed)
        if self._head_norms:
            norm_queries, norm_keys = self._head_norms
            norm_queries.normalise_heads(packed, 0, self._query_heads)
            norm_keys.normalise_heads(packed, self._query_heads, self._query_heads + self._key_heads)
        return self._attend(plan.cache.arrays[self._layer], plan.ranges(self._reach), packed, output, rotary)


class GatedLayer(nn.Module):
    """The layer of Llama and similar models: root mean square norms, rotary positions, a gated feed-forward part."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, feed_forward = layer.self_attn, layer.mlp
        self._attention = _Attention(attention, attention.scaling)
        # A tuple, because an attribute that is a module takes a microsecond to read.
        linears = attention.o_proj, feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj
        self._width: int = feed_forward.up_proj.out_features
        self._linears = tuple(map(PackedLinear.of, linears))
        self._first_norm = kernel.RmsNorm(layer.input_layernorm)
        self._second_norm = kernel.RmsNorm(layer.post_attention_layernorm)

    @staticmethod
    def takes(layer: Any) -> bool:
        return isinstance(layer.mlp.act_fn, SWISH)

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Hidden states [1, T, model size], as transformers' models call it."""
        hidden = hidden[0]
        return self.compute(hidden, current_plan(), self.workspace(hidden, position_embeddings))[None]

    def workspace(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Workspace:
        """For hidden states [T, model size] and what a model's rotary module returns, [1, T, head size] each."""
        cosines, sines = position_embeddings
        rotary = array_of(cosines[0]), array_of(sines[0])
        return Workspace(rotary, Buffer(hidden.shape, hidden.dtype), self._attention.output(hidden))

    def products(self, weights: Mapping[str, LowRankWeights], packed: bool) -> GatedProducts:
        """An adapter's products, from its weights by path in the layer."""
        gate, up = weights.get("mlp.gate_proj"), weights.get("mlp.up_proj")
        return GatedProducts(
            self._attention.products(weights, "o_proj", packed),
            gate is not None,
            LowRank.joined((gate, up), (self._width, self._width), packed),
            _product(weights, "mlp.down_proj", packed),
        )

    def compute(self, hidden: Tensor, plan: StepPlan, workspace: Workspace) -> Tensor:
        """Hidden states [T, model size]."""
        if plan.adapted:
            return self._compute_adapted(hidden, plan, workspace)
        output, gate, up, down = self._linears
        rotary, buffer, attended = workspace
        normed = self._first_norm(hidden, buffer)
        hidden = output.plus(self._attention(normed, plan, attended, rotary), hidden)
        normed = self._second_norm(hidden, buffer)
        return down.plus(up.times(normed, gate.forward(normed, "swish")), hidden)

    def _compute_adapted(self, hidden: Tensor, plan: StepPlan, workspace: Workspace) -> Tensor:
        output, gate, up, down = self._linears
        rotary, buffer, attended = workspace
        adapted: list[tuple[int, int, GatedProducts]] = _products_of(self, plan)
        attentions = [(begin, end, products.attention) for begin, end, products in adapted]
        normed = self._first_norm(hidden, buffer)
        heads = self._attention(normed, plan, attended, rotary, _projections(attentions))
        hidden = output.plus(heads, hidden)
        _add_outputs(attentions, heads, hidden)
        normed = self._second_norm(hidden, buffer)
        gates = gate.forward(normed, "swish")
        # Without the activation, and once for neighbours, because a product of few rows costs as much as one of many.
        for begin, end in _runs([(begin, end) for begin, end, products in adapted if products.has_gate]):
            gates[begin:end] = gate.forward(normed[begin:end])
        ups: list[tuple[int, int, Tensor]] = []
        for begin, end, products in adapted:
            if products.gate_up is not None:
                gate_part, up_part = products.gate_up(normed[begin:end]).chunk(2, dim=-1)
                if products.has_gate:
                    functional.silu(gates[begin:end].add_(gate_part), inplace=True)
                ups.append((begin, end, up_part))
        inner = up.times(normed, gates)
        for begin, end, up_part in ups:
            inner[begin:end].addcmul_(up_part, gates[begin:end])
        hidden = down.plus(inner, hidden)
        for begin, end, products in adapted:
            if products.down is not None:
                Part(begin, end, products.down).add(inner, hidden)
        return hidden


class OPTLayer(nn.Module):
    """OPT's layer: layer norms before each part, a feed-forward part with ReLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self._attention = _Attention(attention, attention.scaling)
        self._output, self._first, self._second = (
            PackedLinear.of(linear) for linear in (attention.out_proj, layer.fc1, layer.fc2)
        )
        self._norms = layer.self_attn_layer_norm, layer.final_layer_norm

    @staticmethod
    def takes(layer: Any) -> bool:
        return layer.do_layer_norm_before and isinstance(layer.activation_fn, nn.ReLU)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        """Hidden states [1, T, model size]."""
        hidden, plan = hidden[0], current_plan()
        adapted: list[tuple[int, int, OPTProducts]] = _products_of(self, plan) if plan.adapted else []
        attentions = [(begin, end, products.attention) for begin, end, products in adapted]
        output = self._attention.output(hidden)
        attended = self._attention(self._norms[0](hidden), plan, output, None, _projections(attentions))
        hidden = self._output.plus(attended, hidden)
        _add_outputs(attentions, attended, hidden)
        normed = self._norms[1](hidden)
        inner = self._first.forward(normed, "relu")
        firsts = [Part(begin, end, products.first) for begin, end, products in adapted if products.first is not None]
        for begin, end in _runs([(part.begin, part.end) for part in firsts]):
            inner[begin:end] = self._first.forward(normed[begin:end])  # See GatedLayer.
        for part in firsts:
            part.add(normed, inner)
            inner[part.begin : part.end].relu_()
        hidden = self._second.plus(inner, hidden)
        for begin, end, products in adapted:
            if products.second is not None:
                Part(begin, end, products.second).add(inner, hidden)
        return hidden[None]

    def products(self, weights: Mapping[str, LowRankWeights], packed: bool) -> OPTProducts:
        """An adapter's products, from its weights by path in the layer."""
        return OPTProducts(
            self._attention.products(weights, "out_proj", packed),
            _product(weights, "fc1", packed),
            _product(weights, "fc2", packed),
        )


FUSED = (GatedLayer, OPTLayer)


def fuse_layers(model: Any) -> None:
    """Replaces the decoder layers of a paged model that are of a supported kind; after `find_reaches`."""
    if not packs(model.device, model.dtype):
        return
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            fused = _fused(layer, model)
            if fused is not None:
                layers[index] = fused


def _fused(layer: Any, model: Any) -> nn.Module | None:
    # Exactly the class: a subclass may compute something else.
    kind = GatedLayer if type(layer) in GATED else OPTLayer if type(layer) is OPTDecoderLayer else None
    if kind is None or not kernel.takes_heads(model.device, model.dtype, layer.self_attn.head_dim):
        return None
    return kind(layer) if kind.takes(layer) else None


def _product(weights: Mapping[str, LowRankWeights], path: str, packed: bool) -> LowRank | None:
    return LowRank(weights[path], packed) if path in weights else None


def _products_of(layer: nn.Module, plan: StepPlan) -> list[Any]:
    """The tokens of a step that have an adapter of this layer, as begin and end, and its products."""
    return [(begin, end, adapter.layers[layer]) for adapter, begin, end in plan.adapted if layer in adapter.layers]


def _projections(attentions: Sequence[tuple[int, int, AttentionProducts]]) -> list[Part]:
    return [Part(begin, end, each.projections) for begin, end, each in attentions if each.projections is not None]


def _add_outputs(attentions: Sequence[tuple[int, int, AttentionProducts]], heads: Tensor, hidden: Tensor) -> None:
    for begin, end, each in attentions:
        if each.output is not None:
            Part(begin, end, each.output).add(heads, hidden)


def _runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges, with neighbours as one."""
    runs: list[tuple[int, int]] = []
    for begin, end in ranges:
        first = runs.pop()[0] if runs and runs[-1][1] == begin else begin
        runs.append((first, end))
    return runs
