"""The forward pass of a decoder whose layers are all fused, without transformers' own code around them.

With a few rows, transformers' wrappers (checks of arguments, captures of outputs, slices of module lists) take as long
as two layers. The rotary angles stay transformers', because they have many variants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.packed_linear import PackedLinear
from headrace_predictor.engine.runners.fused_layers import GatedLayer
from headrace_predictor.engine.runners.step_plan import StepPlan

# Their pass is nothing but embedding, layers, norm and head.
_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class FlatDecoder:
    def __init__(self, model: Any) -> None:
        decoder = model.model
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._rotary = decoder.rotary_emb
        self._layers: list[GatedLayer] = list(decoder.layers)
        self._norm = kernel.RmsNorm(decoder.norm)
        self._head: PackedLinear = model.lm_head

    @staticmethod
    def takes(model: Any) -> bool:
        # Exactly the class: a subclass may compute something else.
        return (
            type(model) in _MODELS
            and all(type(layer) is GatedLayer for layer in model.model.layers)
            and type(model.model.embed_tokens) is nn.Embedding
            and type(model.lm_head) is PackedLinear
        )

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        hidden = torch.embedding(self._embedding, ids[0])
        workspace = self._layers[0].workspace(hidden, self._rotary(hidden, position_ids=positions))
        for layer in self._layers:
            hidden = layer.compute(hidden, plan, workspace)
        if places is None:
            return self._head.forward(self._norm(hidden, workspace.normed))
        hidden = hidden[places]
        return self._head.forward(self._norm(hidden, kernel.Buffer(hidden.shape, hidden.dtype)))
