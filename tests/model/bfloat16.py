"""Marks of bfloat16 tests that need a feature of the processor."""

import pytest
import torch

_CAPABILITIES = torch.cpu.get_capabilities()

needs_bfloat16_processor = pytest.mark.skipif(
    not (_CAPABILITIES.get("avx512_bf16") or _CAPABILITIES.get("amx_bf16")),
    reason="on this processor oneDNN adds up bfloat16 in another order for some numbers of rows",
)

# The datatypes of oneDNN's packed products.
PACKED_DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            reason="on this processor oneDNN has no packed products of bfloat16",
        ),
    ),
]
