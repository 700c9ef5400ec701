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

from headrace_predictor.engine.adapters import FusedLayer, LowRank, LowRankWeights, Part, Products
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

    def projections(self, weights: Mapping[str, LowRankWeights], packed: bool) -> LowRank | None:
        """What an adapter adds to queries, keys and values, which are one output."""
        parts = [weights.get(f"self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj")]
        return LowRank.joined(parts, self._sizes, packed)

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


class GatedLayer(FusedLayer):
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

    def products(self, weights: Mapping[str, LowRankWeights], packed: bool) -> Products:
        gate_up = weights.get("mlp.gate_proj"), weights.get("mlp.up_proj")
        return {
            "projections": self._attention.projections(weights, packed),
            "output": _product(weights, "self_attn.o_proj", packed),
            "gate_up": LowRank.joined(gate_up, (self._width, self._width), packed),
            "down": _product(weights, "mlp.down_proj", packed),
        }

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
        normed = self._first_norm(hidden, buffer)
        heads = self._attention(normed, plan, attended, rotary, _parts(self, plan, "projections"))
        hidden = output.plus(heads, hidden)
        _add(self, plan, "output", heads, hidden)
        normed = self._second_norm(hidden, buffer)
        gates = gate.forward(normed, "swish")
        parts, ups = _parts(self, plan, "gate_up"), []
        _compute_again(gate, normed, gates, parts)
        for part in parts:
            gate_part, up_part = part.product(normed[part.begin : part.end]).chunk(2, dim=-1)
            functional.silu(gates[part.begin : part.end].add_(gate_part), inplace=True)
            ups.append(up_part)
        inner = up.times(normed, gates)
        for part, up_part in zip(parts, ups, strict=True):
            inner[part.begin : part.end].addcmul_(up_part, gates[part.begin : part.end])
        hidden = down.plus(inner, hidden)
        _add(self, plan, "down", inner, hidden)
        return hidden


class OPTLayer(FusedLayer):
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
        output = self._attention.output(hidden)
        projections = _parts(self, plan, "projections")
        attended = self._attention(self._norms[0](hidden), plan, output, None, projections)
        hidden = self._output.plus(attended, hidden)
        _add(self, plan, "output", attended, hidden)
        normed = self._norms[1](hidden)
        inner = self._first.forward(normed, "relu")
        firsts = _parts(self, plan, "first")
        _compute_again(self._first, normed, inner, firsts)
        for part in firsts:
            part.add(normed, inner)
            inner[part.begin : part.end].relu_()
        hidden = self._second.plus(inner, hidden)
        _add(self, plan, "second", inner, hidden)
        return hidden[None]

    def products(self, weights: Mapping[str, LowRankWeights], packed: bool) -> Products:
        return {
            "projections": self._attention.projections(weights, packed),
            "output": _product(weights, "self_attn.out_proj", packed),
            "first": _product(weights, "fc1", packed),
            "second": _product(weights, "fc2", packed),
        }


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


def _parts(layer: nn.Module, plan: StepPlan, name: str) -> list[Part]:
    """The tokens of a step that have an adapter with this product in the layer."""
    found = ((begin, end, adapter.layers.get(layer, {}).get(name)) for adapter, begin, end in plan.adapted)
    return [Part(begin, end, product) for begin, end, product in found if product is not None]


def _add(layer: nn.Module, plan: StepPlan, name: str, x: Tensor, output: Tensor) -> None:
    """Adds the adapters' products of inputs [T, in] to outputs [T, out]."""
    for part in _parts(layer, plan, name):
        part.add(x, output)


def _compute_again(linear: PackedLinear, x: Tensor, output: Tensor, parts: Sequence[Part]) -> None:
    """Writes a layer's outputs without the activation: once for neighbours, because a product of few rows costs as
    much as one of many."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        begin = runs.pop()[0] if runs and runs[-1][1] == part.begin else part.begin
        runs.append((begin, part.end))
    for begin, end in runs:
        output[begin:end] = linear.forward(x[begin:end])
