"""Linear layers with weights packed once, at load, as oneDNN's kernels want them.

torch's own `F.linear` packs them again at every call; for a few rows of bfloat16 that costs more than
the product. The packed copy replaces the weight, except where the weight is shared with the embedding.
CPU and bfloat16 only: elsewhere layers stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_ROWS = 32  # The number of rows that the packing is made for; others work as well.


class PackedLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out]; `weight` is [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: Any) -> None:
    """Replaces the linear layers of a model that nobody trains."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))
            elif type(child) is Conv1D:  # GPT-2's, whose weight lies the other way.
                setattr(module, name, PackedLinear(child.weight.t(), child.bias))
