"""Linear layers of 8 and 4 bits, for models whose forward pass is transformers' own.

What is between the products stays the model's.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from headrace.errors import StartupError
from headrace_predictor.engine.cpu.experts import pack_experts, weights_of
from headrace_predictor.engine.cpu.formats import panel_bytes
from headrace_predictor.engine.cpu.grouped import BLOCK, PANEL
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.packed_linear import (
    PackedLinear,
    called_modules,
    experts_of,
    linears_of,
    pack_routers,
    replace_layers,
    routers_of,
    weight_of,
)


class Quantisation:
    """Quantises the linear layers and experts of a model that a pass calls; the head has 8 bits in any format.

    Weights of other layers may be read as they are, so these stay. So do layers that choose experts or keys, whose
    products are packed: one that depended on the rows beside it could choose others. `open_file` opens the file of so
    many bytes at most.
    """

    def __init__(self, format_: str, open_file: Callable[[int], PackedFile]) -> None:
        self.weights_bytes = self.mapped_bytes = 0
        self._format = format_
        self._open_file = open_file

    def __call__(self, model: Any, run: Callable[[], None]) -> None:
        """Quantises what `run` calls, and runs it again."""
        called = called_modules(model, run)
        head, routers = model.get_output_embeddings(), routers_of(model)
        layers = [linear for linear in linears_of(called) if linear not in routers]
        mixtures = experts_of(called)
        if not layers and not mixtures:
            raise StartupError(f"PREDICTOR_WEIGHTS={self._format}: {type(model).__name__} calls no linear layer")
        sizes = [self._most_bytes(weight_of(layer), layer is head) for layer in layers]
        sizes += [self._most_bytes(weight, False) for experts in mixtures for weight in weights_of(experts).values()]
        file = self._open_file(sum(sizes))

        def quantised(linear: Any) -> PackedLinear:
            layer = PackedLinear(weight_of(linear), linear.bias, self._format, linear is head, file)
            self.weights_bytes += layer.products.nbytes
            return layer

        replace_layers(model, layers, quantised)
        self.weights_bytes += sum(pack_experts(experts, self._format, file) for experts in mixtures)
        file.keep()
        self.mapped_bytes = self.weights_bytes if file.is_mapped else 0
        self.weights_bytes += sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
        pack_routers(routers)
        run()

    def _most_bytes(self, weight: Tensor, is_wide: bool) -> int:
        """Of weights [..., out, in]."""
        *counts, outputs, inputs = weight.shape
        a_panel = panel_bytes("int8" if is_wide else self._format, inputs) + 4 * PANEL
        return math.prod(counts) * ((outputs // PANEL + 1) * a_panel + BLOCK)
