"""The mark of tests that want bfloat16's bits not to depend on the batch."""

import pytest
import torch

_CAPABILITIES = torch.cpu.get_capabilities()

needs_bfloat16_processor = pytest.mark.skipif(
    not (_CAPABILITIES.get("avx512_bf16") or _CAPABILITIES.get("amx_bf16")),
    reason="on this processor oneDNN adds up bfloat16 in another order for some numbers of rows",
)
