"""The adapters that a paged model has loaded, and how they reach its layers.

Fused layers get an adapter's products with the step's plan. In any other model a hook of each adapted module adds them
to its output; the first step with an adapter sets the hooks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace_predictor.engine.adapters import AdaptedTokens, Adapter, LowRank, Products, linear_shapes, read_adapter
from headrace_predictor.engine.cpu.packed_linear import packs
from headrace_predictor.engine.runners.fused_layers import FUSED


class Adapters:
    """The loaded adapters by number. Created before the model's layers are replaced.

    Loads and unloads on any thread, one at a time. A sequence keeps its adapter until it ends, even after an unload.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        """`dtype`: that of the layers' inputs, by default the model's."""
        self._model = model
        self._dtype = dtype or model.dtype
        self._shapes = linear_shapes(model)
        self._loaded: dict[int, Adapter] = {}
        self.is_used = False  # Becomes true with the first adapter.

    def load(self, number: int, folder: Path) -> None:
        """Raises ValueError, or safetensors' own errors."""
        with torch.inference_mode():
            weights = read_adapter(folder, self._shapes, self._dtype, self._model.device)
            packed = packs(self._model.device, self._dtype)
            layers: dict[nn.Module, Products] = {}
            for path, layer in self._model.named_modules():
                if isinstance(layer, FUSED):
                    own = [name for name in weights if name.startswith(f"{path}.")]
                    if own:
                        named = {name.removeprefix(f"{path}."): weights.pop(name) for name in own}
                        layers[layer] = layer.products(named, packed)
            modules = {path: LowRank(pair, packed) for path, pair in weights.items()}
        self._loaded[number] = Adapter(number, layers, modules)
        self.is_used = True

    def unload(self, number: int) -> None:
        self._loaded.pop(number, None)

    def get(self, number: int) -> Adapter | None:
        return self._loaded.get(number)


class AdapterHooks:
    """Adds products to the outputs of a model's modules. Used only by the engine's thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooked: set[str] = set()
        self._tokens: Sequence[AdaptedTokens] = ()

    @contextmanager
    def adding(self, tokens: Sequence[AdaptedTokens]) -> Iterator[None]:
        """Adds the products of these tokens during the block."""
        for path in {path for each in tokens for path in each.adapter.modules} - self._hooked:
            self._hook(path)
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = ()

    def _hook(self, path: str) -> None:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self._tokens:
                return
            x, y = inputs[0].flatten(0, -2), output.flatten(0, -2)
            for adapter, begin, end in self._tokens:
                product = adapter.modules.get(path)
                if product is not None:
                    y[begin:end].add_(product(x[begin:end]))

        self._model.get_submodule(path).register_forward_hook(add)
        self._hooked.add(path)
