"""Decoder layers of the most common kinds in few operations, for the CPU. float32 and bfloat16.

A layer of transformers is some forty small operations, and for a few rows the calls take most of the time. Here
queries, keys and values are one product; rotation, writing to the cache and attention are one kernel; activations and
residual sums are fused into the products. The result is the same except for rounding: transformers rounds intermediate
results to bfloat16, this code does not.

The rest of the model (embeddings, rotary angles, last norm, head) is transformers' own. Layers are recognised by their
class; other classes, and unsupported configurations, stay unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from services.predictor.engine.cpu import kernel
from services.predictor.engine.cpu.packed_linear import PackedLinear, packs
from services.predictor.engine.runners.attention import attend_packed
from services.predictor.engine.runners.step_plan import StepPlan

_GATED = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
_SWISH = (nn.SiLU, SiLUActivation)


class _Attention:
    """Attention over the cache, from normed hidden states to the heads' outputs, before the output layer."""

    def __init__(self, attention: Any, scale: float, window: int) -> None:
        self._project = PackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._layer: int = attention.layer_idx
        self._size: int = attention.head_dim
        self._query_heads: int = attention.q_proj.out_features // self._size
        self._key_heads: int = attention.k_proj.out_features // self._size
        self._scale, self._window = scale, window
        self._norms = [
            (norm.weight.detach(), norm.variance_epsilon)
            for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
            if norm is not None
        ]

    def __call__(self, normed: Tensor, plan: StepPlan, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Hidden states [1, T, model size] to [1, T, query heads x head size]; `rotary` [1, T, head size] each."""
        packed = self._project(normed).view(normed.shape[1], -1, self._size)
        if self._norms:
            packed = self._normed(packed)
        turned = None if rotary is None else (rotary[0][0], rotary[1][0])
        attended = attend_packed(plan, self._layer, packed, self._query_heads, self._scale, self._window, rotary=turned)
        return attended.view(1, normed.shape[1], -1)

    def _normed(self, packed: Tensor) -> Tensor:
        """Applies Qwen3's norms to each query head and each key head."""
        parts = torch.split(packed, [self._query_heads, self._key_heads, self._key_heads], dim=1)
        norms = zip(parts, self._norms, strict=False)
        return torch.cat([*(kernel.rms_norm(part.contiguous(), *norm) for part, norm in norms), parts[2]], dim=1)


class GatedLayer(nn.Module):
    """The layer of Llama and similar models: root mean square norms, rotary positions, a gated feed-forward part."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, feed_forward = layer.self_attn, layer.mlp
        # Qwen defines it for each layer, Mistral for all.
        windowed = attention if hasattr(attention, "sliding_window") else attention.config
        window = getattr(windowed, "sliding_window", None) or 0
        self._attention = _Attention(attention, attention.scaling, window)
        self._output = PackedLinear.of(attention.o_proj)
        self._gate, self._up, self._down = (
            PackedLinear.of(linear) for linear in (feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj)
        )
        self._norms = [
            (norm.weight.detach(), norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]

    @staticmethod
    def takes(layer: Any) -> bool:
        return isinstance(layer.mlp.act_fn, _SWISH)

    def forward(
        self, hidden: Tensor, *, step_plan: StepPlan, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """Hidden states [1, T, model size]."""
        attended = self._attention(kernel.rms_norm(hidden, *self._norms[0]), step_plan, position_embeddings)
        hidden = self._output.plus(attended, hidden)
        normed = kernel.rms_norm(hidden, *self._norms[1])
        return self._down.plus(self._up.times(normed, self._gate(normed, "swish")), hidden)


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
        hidden = self._output.plus(self._attention(self._norms[0](hidden), step_plan, None), hidden)
        return self._second.plus(self._first(self._norms[1](hidden), "relu"), hidden)


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
