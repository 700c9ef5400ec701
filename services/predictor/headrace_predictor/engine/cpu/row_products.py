"""Products of rows with streamed weights, for models whose forward pass is transformers' own.

Inputs and weights are those of formats.py; an integer format's product of a row is the same for any rows beside it,
any threads and any processor.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from headrace_predictor.engine.cpu import decode
from headrace_predictor.engine.cpu.compiled import OPTIONS, run_in_parallel
from headrace_predictor.engine.cpu.formats import MARKERS, pack
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.state.cache import Array


class RowProducts:
    """x·weightᵀ + bias with some weights of one shape, [count, out, in], in one call; biases float [count, out].

    In a model of 4 bits, weights may have 8: `is_wide`.
    """

    def __init__(
        self, weights: Tensor, biases: Tensor | None, format_: str, file: PackedFile, is_wide: bool = False
    ) -> None:
        own = "int8" if is_wide else format_
        self._packed = [pack(own, weight.contiguous(), file=file) for weight in weights]
        self._biases = None if biases is None else biases.detach().float().contiguous()
        self._marker = MARKERS[format_]
        biases_of = [None] * len(weights) if self._biases is None else self._biases
        numbers = [one.numbers(bias) for one, bias in zip(self._packed, biases_of, strict=True)]
        self._products = np.array(numbers, np.int64)
        self.count, self.outputs, self.inputs = weights.shape
        self.nbytes = sum(one.nbytes for one in self._packed)

    def __call__(self, x: Tensor, ends: Array) -> Tensor:
        """Rows [n, in], of which each weight in turn has those up to its end, int64 [count], to [n, out]."""
        rows = x.float().contiguous()
        tokens, blocks = len(rows), self._packed[0].blocks
        out = torch.empty(tokens, self.outputs)
        memory = {
            decode.PACKED: out,
            decode.INPUTS: torch.empty(
                tokens, blocks * BLOCK * self._marker.itemsize + decode.ROW_GAP, dtype=torch.uint8
            ),
            decode.SCALES: torch.empty(tokens, blocks),
            decode.SUMS: torch.empty(tokens, blocks * BLOCK // GROUP, dtype=torch.int32),
        }
        parameters = np.zeros(decode.PRODUCT, np.int64)
        for at, tensor in memory.items():
            parameters[at] = tensor.data_ptr()
        threads = torch.get_num_threads()
        run_in_parallel(_compute, threads, self._marker, rows.numpy(), self._products, ends, parameters, threads)
        return out.to(x.dtype)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _compute(marker: Any, rows: Any, products: Any, ends: Any, parameters: Any, threads: Any) -> None:
    """All products, each as a pass of decode.py computes it."""
    for token in prange(len(rows)):
        decode.convert_inputs(token, rows[token], products[0], parameters, marker)
    chunks = np.zeros(len(products) + 1, np.int64)
    for number in range(len(products)):
        together, divisions, _ = _division(number, products, ends, threads)
        chunks[number + 1] = chunks[number] + -(-products[number, decode.PANELS] // together) * divisions
    for chunk in prange(chunks[-1]):
        number = np.searchsorted(chunks, chunk, side="right") - 1
        product, own = products[number], chunk - chunks[number]
        together, divisions, most = _division(number, products, ends, threads)
        panel = own // divisions * together
        token = (ends[number - 1] if number else 0) + own % divisions * most
        panels, end = min(panel + together, product[decode.PANELS]), min(token + most, ends[number])
        decode.multiply_panels(decode.MULTIPLY, product, panel, panels, token, end, parameters, marker)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _division(number: Any, products: Any, ends: Any, threads: Any) -> Any:
    """Of a product: the panels of a chunk, the parts of its rows, and the rows of a part."""
    tokens = ends[number] - (ends[number - 1] if number else 0)
    together, most = decode.sizes_of_chunk(products[number], tokens, threads, False)
    return together, (tokens + most - 1) // most, most
