"""Linear layers with weights packed once, at load, as oneDNN's kernels want them. CPU, float32 and bfloat16.

torch's own `F.linear` packs bfloat16 weights again at every call, and its float32 sums in another order
for every number of rows. oneDNN's packed product is faster for a few rows, and adds up a row in the
same order in whatever batch it stands, so that results do not depend on it. One row alone is the
exception for wide inputs; where it is, by trial, a second row goes along.

A packed copy takes the weight's place, except where the weight is the embedding's too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_ROWS = 32  # The number of rows that the packing is made for; others work as well.
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out]; `weight` is [out, in]."""

    # Some of transformers' layers ask for the dtype of the next one's weight, where it has any.
    weight = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._bias = None if bias is None else bias.detach()
        trial = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        self._needs_two_rows = not torch.equal(self._product(trial)[:1], self._product(trial[:1]))

    def forward(self, x: Tensor) -> Tensor:
        if self._needs_two_rows and x.numel() == x.shape[-1]:
            two = x.expand(*x.shape[:-2], 2, x.shape[-1]).contiguous()
            return self._product(two)[..., :1, :]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: Any) -> None:
    """Replaces the linear layers of a model that nobody trains, where oneDNN knows device and dtype."""
    if model.device.type != "cpu" or model.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    # Its bfloat16 wants vectors of 512 bits.
    if model.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias))
            elif type(child) is Conv1D:  # GPT-2's, whose weight lies the other way.
                setattr(module, name, PackedLinear(child.weight.t(), child.bias))
