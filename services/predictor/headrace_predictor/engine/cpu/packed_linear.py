"""Linear layers whose weights are packed once, at load, for oneDNN's kernels. CPU, float32 and bfloat16.

torch's own `F.linear` packs bfloat16 weights at every call, and the order of its float32 sums depends on the number of
rows. oneDNN's packed product is faster for a few rows, and the order of a row's sum does not depend on the batch: in
float32, and in bfloat16 on processors that multiply it in hardware (AVX512_BF16, AMX). There are two exceptions. A
single row with wide inputs: if a test at load finds it, a second row is added to such a product. In bfloat16 with AMX
more than 32 rows of 512 inputs or more (seen with oneDNN of torch 2.13): they are computed in slices, which takes about
twice as long for 256 rows.

On one thread a few rows of float32 have a product of ours, in less time, where it has the same bits (panels.py).

A packed copy replaces the weight, unless the embedding shares the weight.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.tiles import HAS_TILES

_ROWS = 32  # The packing is optimised for this number of rows, the size of a slice; others work as well.
_SLICED_INPUTS = 512
_TRIAL_NUMBERS, _TRIAL_ROWS = 2**15, 128  # In bfloat16 few numbers differ.
_TRIAL_OUTPUTS = 256  # So that sums in another order differ.
_SECTIONS = (512, 1024)  # Inputs whose products oneDNN adds before it adds the sum to others.
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # By dtype, see formats.py.
# With fewer bits they would choose other experts, or other keys.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "indexer"})
_LINEAR = (nn.Linear, Conv1D)


class WeightKind(NamedTuple):
    """What some layers of transformers read of another layer's weight."""

    dtype: torch.dtype
    device: torch.device


class PackedLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out]; `weight` is [out, in].

    An operation that follows the product can be fused with it, before rounding: an activation, or a sum or product with
    another tensor [..., out].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = WeightKind(weight.dtype, weight.device)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._bias = None if bias is None else bias.detach()
        self._few_rows: Callable[[Tensor], Tensor] | None = None
        self._few_numbers = 0  # The numbers in so many rows, at most.
        is_half = weight.dtype == torch.bfloat16
        self._is_sliced = is_half and HAS_TILES and weight.shape[1] >= _SLICED_INPUTS
        rows = 2 * max(1, min(_TRIAL_NUMBERS // weight.shape[0], _TRIAL_ROWS)) if is_half else 2
        trial = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        self._needs_two_rows = any(
            not torch.equal(self._product(two)[:1], self._product(two[:1])) for two in trial.tensor_split(rows // 2)
        )
        if weight.dtype == torch.float32 and torch.get_num_threads() == 1:
            self._find_few_rows(weight.shape)

    @classmethod
    def of(cls, *linears: nn.Linear) -> "PackedLinear":
        """One layer for several with the same input; their outputs are concatenated."""
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        return cls(torch.cat([linear.weight.detach() for linear in linears]), bias)

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        """`activation`: "none", or "relu", or "swish"."""
        if self._few_rows and x.numel() <= self._few_numbers and activation == "none" and x.dtype == torch.float32:
            return self._few_rows(x)
        if self._is_lone_row(x):
            return self._product(_twice(x), activation)[..., :1, :]
        return self._product(x, activation)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The output plus `other` [..., out]."""
        return self._combined(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The output times `other` [..., out]."""
        return self._combined(x, other, "mul")

    def _find_few_rows(self, shape: torch.Size) -> None:
        """Sets a product of a few rows that takes less time, if one has the bits of oneDNN's."""
        try:
            from headrace_predictor.engine.cpu.panels import MOST_ROWS, PanelProduct
        except ImportError:  # Numba is optional.
            return
        address, size = torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed)
        rows = MOST_ROWS + min(_TRIAL_OUTPUTS // shape[0], _TRIAL_ROWS)
        trial = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0))
        expected = self._product(trial)
        for section in _SECTIONS:
            with suppress(ValueError):
                product = PanelProduct(shape, address, size, self._bias, section)
                if torch.equal(torch.cat([product(some) for some in torch.split(trial, MOST_ROWS)]), expected):
                    self._few_rows, self._few_numbers = product, MOST_ROWS * shape[1]
                    return

    def _is_lone_row(self, x: Tensor) -> bool:
        return self._needs_two_rows and x.numel() == x.shape[-1]

    def _combined(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        combine = torch.ops.mkldnn._linear_pointwise.binary
        if self._is_lone_row(x):
            return combine(_twice(x), _twice(other), self._packed, self._bias, how)[..., :1, :]  # type: ignore[no-any-return]
        if self._is_sliced and _rows_of(x) > _ROWS:
            return _in_slices(lambda x, other: combine(x, other, self._packed, self._bias, how), x, other)
        return combine(x, other, self._packed, self._bias, how)  # type: ignore[no-any-return]

    def _product(self, x: Tensor, activation: str = "none") -> Tensor:
        compute = torch.ops.mkldnn._linear_pointwise.default
        if self._is_sliced and _rows_of(x) > _ROWS:
            return _in_slices(lambda x: compute(x, self._packed, self._bias, activation, [], ""), x)
        return compute(x, self._packed, self._bias, activation, [], "")  # type: ignore[no-any-return]


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
            if product is not None and (bias is None) == (product._bias is None):
                return product(rows)
            return functional.linear(rows, weight.plain.to(rows.dtype), bias)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _in_slices(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The results for slices of nearly equal numbers of rows, so that none has a single row."""
    rows = _rows_of(inputs[0])
    parts = zip(*(x.reshape(rows, x.shape[-1]).tensor_split(-(-rows // _ROWS)) for x in inputs), strict=True)
    return torch.cat([compute(*part) for part in parts]).reshape(*inputs[0].shape[:-1], -1)


def _twice(x: Tensor) -> Tensor:
    return x.expand(*x.shape[:-2], 2, x.shape[-1]).contiguous()


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products for a device and dtype."""
    if device.type != "cpu" or dtype not in _FORMATS or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # oneDNN's bfloat16 kernels need vectors of 512 bits.
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
        with suppress(ImportError):  # Numba is optional.
            from headrace_predictor.engine.cpu.experts import pack_experts

            for experts in mixtures:
                pack_experts(experts, _FORMATS[model.dtype], PackedFile())
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
