"""Experts that transformers keeps in one tensor, as linear layers, which are packed or quantised like all others.

Transformers' own products read these tensors row by row, or pass through all experts for any number of tokens. Here a
step computes those experts that its tokens have, each once for all of them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class ExpertLinears(nn.ModuleList):
    """The same product of each expert."""

    def forward(self, rows: Tensor, counts: dict[int, int]) -> Tensor:
        """Rows [n, in], of which each expert in turn has so many, to [n, out]."""
        parts = torch.split(rows, [*counts.values()])
        return torch.cat([self[expert](part) for expert, part in zip(counts, parts, strict=True)])


def split_experts(model: Any) -> None:
    """Replaces the tensors of all modules that follow transformers' interface for experts."""
    for module in [*model.modules()]:
        if isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "has_post_expert_norm"):
            module.opening = _linears(module, "gate_up_proj" if module.has_gate else "up_proj")
            module.closing = _linears(module, "down_proj")
            module.forward = partial(_compute, module)


def _linears(module: Any, name: str) -> ExpertLinears:
    """Takes a tensor [experts, …] and its biases from a module."""
    weights = module._parameters.pop(name).detach()
    biases = module._parameters.pop(f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    linears = ExpertLinears()
    for weight, bias in zip(weights.mT if module.is_transposed else weights, biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linears.append(linear)
    return linears


def _compute(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum [tokens, n] of each token's experts [tokens, k], times their weights."""
    chosen = top_k_index.flatten()
    order = chosen.argsort()
    counts = {expert: count for expert, count in enumerate(chosen.bincount().tolist()) if count}
    inner = experts.opening(hidden_states[order // top_k_index.shape[1]], counts)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = experts.closing(inner, counts)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    own = torch.empty_like(outputs)
    own[order] = outputs
    weighted = own.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)
