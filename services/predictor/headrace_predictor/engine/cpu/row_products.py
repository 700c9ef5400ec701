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
from headrace_predictor.engine.cpu.recording import launch
from headrace_predictor.engine.cpu.threads import kernel_threads
from headrace_predictor.engine.cpu.vectors import array_at, narrow, widen
from headrace_predictor.engine.state.cache import Array

_FEW_NUMBERS = 1 << 18  # Which one thread has converted before another would have begun.
_LEAST_ROWS = 4  # Fewer take as long.
_ALONE = 1 << 22  # Multiplications that are not worth another thread.
_F = np.empty(0, np.float32)
_NUMBERS = {torch.float32: _F, torch.bfloat16: np.empty(0, np.uint16)}


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
        blocks = self._packed[0].blocks
        # Of results, inputs, scales and sums.
        self._row_bytes = (
            4 * self.outputs + blocks * (BLOCK * self._marker.itemsize + 4 + BLOCK // GROUP * 4) + decode.ROW_GAP
        )
        self.nbytes = sum(one.nbytes for one in self._packed)

    def __call__(self, x: Tensor, ends: Array | None = None) -> Tensor:
        """Rows [..., in], of which each weight in turn has those up to its end, int64 [count], to [..., out].

        `ends` may be None for a single weight.
        """
        rows = x.contiguous() if x.dtype in _NUMBERS else x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=rows.dtype)
        tokens, threads = x.numel() // self.inputs, kernel_threads()
        memory = torch.empty(tokens * self._row_bytes, dtype=torch.uint8)
        if ends is None:
            ends = np.array([tokens])
        like = _NUMBERS[rows.dtype]
        addresses = rows.data_ptr(), self._products, ends, memory.data_ptr(), out.data_ptr()
        arguments = self._marker, like, *addresses, threads
        if threads == 1 or max(tokens, _LEAST_ROWS) * self.outputs * self.inputs < _ALONE:
            launch(_compute_in_turn, *arguments)
        else:
            launch(run_in_parallel, _compute_in_parallel, threads, *arguments)
        return out.to(x.dtype)


def _computing(loop: Any) -> Any:
    """The kernel with a loop over its work that is `range` or, for several threads, `prange`."""

    @njit(parallel=loop is prange, **OPTIONS)  # type: ignore[untyped-decorator]
    def compute(marker: Any, like: Any, x: Any, products: Any, ends: Any, memory: Any, out: Any, threads: Any) -> None:
        """All products, each as a pass of decode.py computes it; addresses of numbers like `like`: `x` and `out`."""
        tokens = ends[-1]
        parameters, chunks = _parameters(products[0], tokens, memory), _chunks(products, ends, threads)
        if tokens * products[0, decode.ROW] <= _FEW_NUMBERS:
            for token in range(tokens):
                _convert(token, x, like, products[0], parameters, marker)
        else:
            for token in loop(tokens):
                _convert(token, x, like, products[0], parameters, marker)
        for chunk in loop(chunks[-1]):
            _multiply(chunk, chunks, products, ends, parameters, marker, threads)
        if tokens * products[0, decode.OUTPUTS] <= _FEW_NUMBERS:
            for token in range(tokens):
                _narrow(token, products[0], parameters, out, like)
        else:
            for token in loop(tokens):
                _narrow(token, products[0], parameters, out, like)

    return compute


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _parameters(product: Any, tokens: Any, memory: Any) -> Any:
    """Those of decode.py: addresses of results, scales, sums and inputs in the memory."""
    parameters, blocks = np.zeros(decode.PRODUCT, np.int64), product[decode.BLOCKS]
    parameters[decode.PACKED] = memory
    parameters[decode.SCALES] = parameters[decode.PACKED] + tokens * product[decode.OUTPUTS] * 4
    parameters[decode.SUMS] = parameters[decode.SCALES] + tokens * blocks * 4
    parameters[decode.INPUTS] = parameters[decode.SUMS] + tokens * blocks * (BLOCK // GROUP) * 4
    return parameters


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _chunks(products: Any, ends: Any, threads: Any) -> Any:
    """The first chunk of each product, and the number of all."""
    chunks = np.zeros(len(products) + 1, np.int64)
    for number in range(len(products)):
        together, divisions, _ = _division(number, products, ends, threads)
        chunks[number + 1] = chunks[number] + -(-products[number, decode.PANELS] // together) * divisions
    return chunks


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _convert(token: Any, x: Any, like: Any, product: Any, parameters: Any, marker: Any) -> None:
    size = product[decode.ROW]
    numbers, row = array_at(x + token * size * like.itemsize, (size,), like), np.empty(size, np.float32)
    for k in range(size):
        row[k] = widen(numbers[k])
    decode.convert_inputs(token, row, product, parameters, marker)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _narrow(token: Any, product: Any, parameters: Any, out: Any, like: Any) -> None:
    size = product[decode.OUTPUTS]
    sums = array_at(parameters[decode.PACKED] + token * size * 4, (size,), _F)
    results = array_at(out + token * size * like.itemsize, (size,), like)
    for n in range(size):
        results[n] = narrow(sums[n], results[n])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _multiply(chunk: Any, chunks: Any, products: Any, ends: Any, parameters: Any, marker: Any, threads: Any) -> None:
    number = np.searchsorted(chunks, chunk, side="right") - 1
    own = chunk - chunks[number]
    together, divisions, most = _division(number, products, ends, threads)
    panel = own // divisions * together
    token = (ends[number - 1] if number else 0) + own % divisions * most
    panels, end = min(panel + together, products[number, decode.PANELS]), min(token + most, ends[number])
    decode.multiply_panels(decode.MULTIPLY, products[number], panel, panels, token, end, parameters, marker)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _division(number: Any, products: Any, ends: Any, threads: Any) -> Any:
    """Of a product: the panels of a chunk, the parts of its rows, and the rows of a part."""
    tokens = ends[number] - (ends[number - 1] if number else 0)
    together, most = decode.sizes_of_chunk(products[number], tokens, threads, False)
    return together, (tokens + most - 1) // most, most


_compute_in_turn, _compute_in_parallel = _computing(range), _computing(prange)
