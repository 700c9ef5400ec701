"""Decoder layers of the most common kinds in few operations, for the CPU. float32 and bfloat16.

A layer of transformers is some forty small operations, and for a few rows the calls take most of the time. Here
queries, keys and values are one product; rotation, writing to the cache and attention are one kernel; activations and
residual sums are fused into the products. The result is the same except for rounding: transformers rounds intermediate
results to bfloat16, this code does not.

The rest of the model is transformers' own, or that of `flat_decoder.py`. Layers are recognised by their class; other
classes, and unsupported configurations, stay unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from services.predictor.engine.cpu import kernel
from services.predictor.engine.cpu.kernel import Buffer
from services.predictor.engine.cpu.packed_linear import PackedLinear, packs
from services.predictor.engine.runners.step_plan import StepPlan
from services.predictor.engine.state.arrays import Array, array_of

_GATED = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_SWISH = (nn.SiLU, SiLUActivation)


class Workspace(NamedTuple):
    """What the layers of a model share in a step. A buffer is read by the next product, before it is written again."""

    rotary: tuple[Array, Array]  # Cosines and sines [T, head size].
    normed: Buffer  # [T, model size]
    attended: Buffer  # [T, query heads, head size]


class _Attention:
    """Attention over the cache, from normed hidden states to the heads' outputs, before the output layer."""

    def __init__(self, attention: Any, scale: float, window: int) -> None:
        self._project = PackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._layer: int = attention.layer_idx
        self._size: int = attention.head_dim
        self._query_heads: int = attention.q_proj.out_features // self._size
        self._key_heads: int = attention.k_proj.out_features // self._size
        self._window = window
        self._attend = kernel.Attention(self._query_heads, self._key_heads, scale)
        # Qwen3 norms each query head and each key head.
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._head_norms = [kernel.RmsNorm(norm) for norm in norms if norm is not None]

    def output(self, hidden: Tensor) -> Buffer:
        """A buffer for the output for hidden states [T, model size]."""
        return Buffer((len(hidden), self._query_heads, self._size), hidden.dtype)

    def __call__(
        self, normed: Tensor, plan: StepPlan, output: Buffer, rotary: tuple[Array, Array] | None = None
    ) -> Tensor:
        """Hidden states [T, model size] to [T, query heads x head size]; `rotary` as in `Workspace`."""
        packed = self._project.forward(normed)
        if self._head_norms:
            norm_queries, norm_keys = self._head_norms
            norm_queries.normalise_heads(packed, 0, self._query_heads)
            norm_keys.normalise_heads(packed, self._query_heads, self._query_heads + self._key_heads)
        return self._attend(plan.cache.arrays[self._layer], plan.ranges(self._window), packed, output, rotary)


class GatedLayer(nn.Module):
    """The layer of Llama and similar models: root mean square norms, rotary positions, a gated feed-forward part."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, feed_forward = layer.self_attn, layer.mlp
        # Qwen defines it for each layer, Mistral for all.
        windowed = attention if hasattr(attention, "sliding_window") else attention.config
        window = getattr(windowed, "sliding_window", None) or 0
        self._attention = _Attention(attention, attention.scaling, window)
        # A tuple, because an attribute that is a module takes a microsecond to read.
        linears = attention.o_proj, feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj
        self._linears = tuple(map(PackedLinear.of, linears))
        self._first_norm = kernel.RmsNorm(layer.input_layernorm)
        self._second_norm = kernel.RmsNorm(layer.post_attention_layernorm)

    @staticmethod
    def takes(layer: Any) -> bool:
        return isinstance(layer.mlp.act_fn, _SWISH)

    def forward(
        self, hidden: Tensor, *, step_plan: StepPlan, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Hidden states [1, T, model size], as transformers' models call it."""
        hidden = hidden[0]
        return self.compute(hidden, step_plan, self.workspace(hidden, position_embeddings))[None]

    def workspace(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Workspace:
        """For hidden states [T, model size] and what a model's rotary module returns, [1, T, head size] each."""
        cosines, sines = position_embeddings
        rotary = array_of(cosines[0]), array_of(sines[0])
        return Workspace(rotary, Buffer(hidden.shape, hidden.dtype), self._attention.output(hidden))

    def compute(self, hidden: Tensor, plan: StepPlan, workspace: Workspace) -> Tensor:
        """Hidden states [T, model size]."""
        output, gate, up, down = self._linears
        rotary, buffer, attended = workspace
        normed = self._first_norm(hidden, buffer)
        hidden = output.plus(self._attention(normed, plan, attended, rotary), hidden)
        normed = self._second_norm(hidden, buffer)
        return down.plus(up.times(normed, gate.forward(normed, "swish")), hidden)


class OPTLayer(nn.Module):
    """OPT's layer: layer norms before each part, a feed-forward part with ReLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self._attention = _Attention(attention, attention.scaling, 0)
        self._output, self._first, self._second = (
            PackedLinear.of(linear) for linear in (attention.out_proj, layer.fc1, layer.fc2)
        )
        self._norms = layer.self_attn_layer_norm, layer.final_layer_norm

    @staticmethod
    def takes(layer: Any) -> bool:
        return layer.do_layer_norm_before and isinstance(layer.activation_fn, nn.ReLU)

    def forward(self, hidden: Tensor, *, step_plan: StepPlan, **_: Any) -> Tensor:
        """Hidden states [1, T, model size]."""
        hidden = hidden[0]
        attended = self._attention(self._norms[0](hidden), step_plan, self._attention.output(hidden))
        hidden = self._output.plus(attended, hidden)
        return self._second.plus(self._first.forward(self._norms[1](hidden), "relu"), hidden)[None]


def fuse_layers(model: Any) -> None:
    """Replaces the decoder layers of a paged model that are of a supported kind."""
    if not packs(model):
        return
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            fused = _fused(layer, model)
            if fused is not None:
                layers[index] = fused


def _fused(layer: Any, model: Any) -> nn.Module | None:
    # Exactly the class: a subclass may compute something else.
    kind = GatedLayer if type(layer) in _GATED else OPTLayer if type(layer) is OPTDecoderLayer else None
    if kind is None or not kernel.takes_heads(model.device, model.dtype, layer.self_attn.head_dim):
        return None
    return kind(layer) if kind.takes(layer) else None
