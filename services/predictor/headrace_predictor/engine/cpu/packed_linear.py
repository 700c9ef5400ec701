"""Linear layers whose weights are packed once, at load, in a format of formats.py. CPU, float32 and bfloat16.

In torch's own products the order of a row's sums depends on the number of rows. In these a row's product is the same
for any rows beside it and any threads; those of integers and of float32 on any processor.

A packed copy replaces the weight, unless the embedding shares the weight.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from headrace_predictor.engine.cpu.packed_file import PackedFile

try:
    from headrace_predictor.engine.cpu.experts import pack_experts
    from headrace_predictor.engine.cpu.row_products import RowProducts

    _IS_COMPILED = True
except ImportError:  # Numba is optional.
    _IS_COMPILED = False

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # By dtype, see formats.py.
# With fewer bits they would choose other experts, or other keys.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "indexer"})
_LINEAR = (nn.Linear, Conv1D)


class WeightKind(NamedTuple):
    """What some layers of transformers read of another layer's weight."""

    dtype: torch.dtype
    device: torch.device


class PackedLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out], in the dtype of x; `weight` is [out, in].

    `format_` is the model's, by default that of the weight's dtype; with `is_wide` this layer has 8 bits in any case.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        format_: str | None = None,
        is_wide: bool = False,
        file: PackedFile | None = None,
    ) -> None:
        super().__init__()
        self.weight = WeightKind(weight.dtype, weight.device)
        self.has_bias = bias is not None
        biases = None if bias is None else bias[None]
        format_ = format_ or FORMATS[weight.dtype]
        self.products = RowProducts(weight.detach()[None], biases, format_, file or PackedFile(), is_wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.products(x)


class PackedWeight(Tensor):
    """A weight [out, in] in a module of transformers that calls `F.linear`: the product is that of `PackedLinear`.

    Conversions to another dtype return it unchanged: a product has the dtype of its rows.
    """

    plain: Tensor
    products: dict[torch.dtype, PackedLinear]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "PackedWeight":
        """`bias`: what the module adds; a product without it is that of torch."""
        packed = weight.detach().as_subclass(cls)
        packed.plain = weight.detach()
        packed.products = {
            dtype: PackedLinear(weight.to(dtype), None if bias is None else bias.to(dtype))
            for dtype in {weight.dtype, torch.float32}
            if packs(weight.device, dtype)
        }
        return packed

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.type, Tensor.to, Tensor.float) and isinstance(args[0], cls):
            return args[0]
        if function is functional.linear and hasattr(args[1], "products"):
            rows, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
            product = weight.products.get(rows.dtype)
            if product is not None and (bias is not None) == product.has_bias:
                return product(rows)
            return functional.linear(rows, weight.plain.to(rows.dtype), bias)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a device and dtype can be packed."""
    return _IS_COMPILED and device.type == "cpu" and dtype in FORMATS


def pack_linears(model: Any, only: list[Any] | None = None, but: Collection[Any] = ()) -> None:
    """Replaces the linear layers of a model for inference, where they can be packed.

    `only` these, by default all, `but` those whose weights other modules read.
    """
    if packs(model.device, model.dtype):
        wanted = [linear for linear in (linears_of(model.modules()) if only is None else only) if linear not in but]
        replace_layers(model, wanted, lambda linear: PackedLinear(weight_of(linear), linear.bias))


def pack_called(model: Any, run: Callable[[], None]) -> None:
    """Packs linear layers and experts that `run` calls, and runs it again: the weights of others may be read as they
    are."""
    called = called_modules(model, run)
    pack_linears(model, linears_of(called))
    _pack_mixtures(model, experts_of(called))
    run()


def pack_mixtures(model: Any, run: Callable[[], None]) -> None:
    """Packs the experts that `run` calls and what chooses them, and runs it again."""
    has_experts = bool(experts_of(model.modules()))
    _pack_mixtures(model, experts_of(called_modules(model, run)) if has_experts else [])
    run()


def _pack_mixtures(model: Any, mixtures: list[Any]) -> None:
    if packs(model.device, model.dtype):
        for experts in mixtures:
            pack_experts(experts, FORMATS[model.dtype], PackedFile())
        pack_routers(routers_of(model))


def routers_of(model: Any) -> set[Any]:
    """The modules that choose experts, or keys, by their names."""
    named = model.named_modules(remove_duplicate=False)
    return {module for path, module in named if not _ROUTERS.isdisjoint(path.split("."))}


def pack_routers(routers: Iterable[Any]) -> None:
    """Packs the weights [out, in] that routers read themselves: a product that depended on the rows beside it could
    choose others."""
    for module in routers:
        if (weight := module._parameters.get("weight")) is not None and weight.dim() == 2:
            del module.weight
            module.weight = PackedWeight.of(weight, module._parameters.get("bias"))


def is_linear(module: Any) -> bool:
    """Whether a module is x·weightᵀ + bias and nothing else: a class derived from torch's may give more than that."""
    return type(module) in _LINEAR or type(module).__name__ == "FalconLinear"


def linears_of(modules: Iterable[Any]) -> list[Any]:
    return [module for module in modules if is_linear(module)]


def experts_of(modules: Iterable[Any]) -> list[Any]:
    """Those that follow transformers' interface for experts."""
    return [
        module
        for module in modules
        if isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "has_post_expert_norm")
    ]


def read_linears(model: Any, run: Callable[[], object]) -> set[Any]:
    """The linear layers that modules which `run` calls do not call, but have: they may read the weights."""
    called = set(called_modules(model, run))
    return {child for module in called for child in module.children() if is_linear(child)} - called


def called_modules(model: Any, run: Callable[[], object]) -> list[Any]:
    """The modules of a model that `run` calls, in the model's order."""
    called: set[Any] = set()
    hooks = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [module for module in model.modules() if module in called]


def replace_layers(model: Any, layers: list[Any], make: Callable[[Any], nn.Module]) -> None:
    """Puts what `make` returns in each place of each layer; empties the list, so that their weights go one by one."""
    places: dict[Any, list[tuple[Any, str]]] = {layer: [] for layer in layers}
    for path, layer in model.named_modules(remove_duplicate=False):
        if layer in places:
            owner, _, name = path.rpartition(".")
            places[layer].append((model.get_submodule(owner), name))
    layers.reverse()
    while layers:
        layer = layers.pop()
        made = make(layer)
        for module, name in places.pop(layer):
            setattr(module, name, made)


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """The weight [out, in] of a layer; GPT-2's are stored transposed."""
    return linear.weight.t() if type(linear) is Conv1D else linear.weight
