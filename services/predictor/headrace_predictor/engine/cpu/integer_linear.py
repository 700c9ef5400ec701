"""Linear layers of 8 and 4 bits, for models whose forward pass is transformers' own.

Inputs and weights are those of formats.py, and a row's product is the same for any rows beside it, any threads and any
processor. What is between the products stays the model's.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from headrace.errors import StartupError
from headrace_predictor.engine.cpu import decode
from headrace_predictor.engine.cpu.attention import POOL
from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.experts import ExpertLinears, split_experts
from headrace_predictor.engine.cpu.formats import MARKERS, pack, panel_bytes
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.packed_linear import WeightKind, called_linears, weight_of
from headrace_predictor.engine.cpu.panels import BLOCK, GROUP, PANEL

# With fewer bits they would choose other experts.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


class IntegerLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out], in the dtype of x.

    `weight` is [out, in]. `format_` is the model's; with `is_wide` this layer has 8 bits in any case.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, format_: str, is_wide: bool, file: PackedFile) -> None:
        super().__init__()
        self.weight = WeightKind(weight.dtype, weight.device)
        self.packed = packed = pack("int8" if is_wide else format_, weight.detach().contiguous(), file=file)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._marker = MARKERS[format_]
        self._product = np.array(
            [
                packed.weights.ctypes.data,
                packed.scales.ctypes.data if len(packed.scales) else 0,
                0 if self._bias is None else self._bias.data_ptr(),
                packed.panels,
                packed.blocks,
                packed.weights.nbytes // packed.panels,
                packed.outputs,
                packed.inputs,
            ],
            np.int64,
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.packed.inputs).float().contiguous()
        tokens, blocks = len(rows), self.packed.blocks
        out = torch.empty(tokens, self.packed.outputs)
        memory = {
            decode.PACKED: out,
            decode.INPUTS: torch.empty(tokens, blocks * BLOCK, dtype=torch.uint8),
            decode.SCALES: torch.empty(tokens, blocks),
            decode.SUMS: torch.empty(tokens, blocks * BLOCK // GROUP, dtype=torch.int32),
        }
        parameters = np.zeros(decode.PRODUCT, np.int64)
        for at, tensor in memory.items():
            parameters[at] = tensor.data_ptr()
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        with POOL:
            numba.set_num_threads(threads)
            _compute(self._marker, rows.numpy(), self._product, parameters, threads)
        return out.to(x.dtype).view(*x.shape[:-1], self.packed.outputs)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _compute(marker: Any, rows: Any, product: Any, parameters: Any, threads: Any) -> None:
    """One product, as a pass of decode.py computes it."""
    tokens = len(rows)
    for token in prange(tokens):
        decode.convert_inputs(token, rows[token], product, parameters, marker)
    together = decode.panels_of_chunk(product, tokens, threads, False)
    divisions = (tokens + decode.TOKENS_OF_CHUNK - 1) // decode.TOKENS_OF_CHUNK
    for chunk in prange((product[decode.PANELS] + together - 1) // together * divisions):
        panel, token = chunk // divisions * together, chunk % divisions * decode.TOKENS_OF_CHUNK
        panels, end = min(panel + together, product[decode.PANELS]), min(token + decode.TOKENS_OF_CHUNK, tokens)
        decode.multiply_panels(decode.MULTIPLY, product, panel, panels, token, end, parameters, marker)


class Quantisation:
    """Quantises the linear layers of a model that a pass calls, and all experts beside one; the head has 8 bits in any
    format.

    Weights of other layers may be read as they are, so these stay, and so do layers that choose experts. `open_file`
    opens the file of so many bytes at most.
    """

    def __init__(self, format_: str, open_file: Callable[[int], PackedFile]) -> None:
        self.weights_bytes = self.mapped_bytes = 0
        self._format = format_
        self._open_file = open_file

    def __call__(self, model: Any, run: Callable[[], None]) -> None:
        """Quantises what `run` calls, and runs it again."""
        split_experts(model)
        head, called = model.get_output_embeddings(), called_linears(model, run)
        for experts in (module for module in model.modules() if isinstance(module, ExpertLinears)):
            if not called.isdisjoint(experts):
                called.update(experts)
        places: dict[Any, list[tuple[Any, str]]] = {}
        for path, child in model.named_modules(remove_duplicate=False):
            owner, _, name = path.rpartition(".")
            if child in called and name not in _ROUTERS:
                places.setdefault(child, []).append((model.get_submodule(owner), name))
        if not places:
            raise StartupError(f"PREDICTOR_WEIGHTS={self._format}: {type(model).__name__} calls no linear layer")
        file = self._open_file(sum(self._most_bytes(child, child is head) for child in places))
        called.clear()
        while places:
            child, users = next(iter(places.items()))
            del places[child]  # Its weights can go when they are packed.
            layer = IntegerLinear(weight_of(child), child.bias, self._format, child is head, file)
            self.weights_bytes += layer.packed.weights.nbytes + layer.packed.scales.nbytes
            for module, name in users:
                setattr(module, name, layer)
        file.keep()
        self.mapped_bytes = self.weights_bytes if file.is_mapped else 0
        self.weights_bytes += sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
        run()

    def _most_bytes(self, linear: Any, is_wide: bool) -> int:
        outputs, inputs = weight_of(linear).shape
        a_panel = panel_bytes("int8" if is_wide else self._format, inputs) + 4 * PANEL
        return (outputs // PANEL + 1) * a_panel + BLOCK
