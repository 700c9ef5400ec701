"""Checkpoints whose layers are quantised: GPTQ and AWQ of 4 bits, compressed-tensors of 4 and 8 bits, fp8.

The tensors that a layer has in place of its weight become one matrix: grouped integers, which a runner can compute as
they are, or numbers. Sources of the layouts: AutoGPTQ's and AutoAWQ's packing, the library compressed-tensors, and
transformers' integrations of them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.models.weight_headers import weight_files
from headrace_predictor.engine.cpu.grouped import GROUP, GroupedMatrix, Numbers

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Of a word's nibbles: the output of each.
_IGNORED = ("input_scale", "k_scale", "v_scale", "weight_shape", "input_global_scale")
_OF_LAYERS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    "weight_g_idx",
)
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
Parts = Mapping[str, Tensor]


def quantisation_of(config: Any) -> dict[str, Any]:
    """What a configuration states of a quantisation; empty where there is none that this module reads."""
    stated = getattr(config, "quantization_config", None) or {}
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    return stated if stated.get("quant_method") in _READ else {}


class LayerMatrix:
    """The matrix of a layer, read from its tensors when it is needed; `kind` is the method of its quantisation."""

    def __init__(self, kind: str, read: Callable[[], Numbers | Tensor], found: Numbers | Tensor) -> None:
        self.kind = kind
        self._read = read
        self._held: Numbers | None = None  # While it is packed, panel by panel.
        if isinstance(found, Numbers):
            outputs, inputs = found.numbers.shape
            # As it is.
            self.grouped = GroupedMatrix(0 if found.minimums.size else 1, outputs, inputs, self._rows)

    def values(self, dtype: torch.dtype) -> Tensor:
        """All of it, as numbers."""
        found = self._read()
        return (found if isinstance(found, Tensor) else torch.from_numpy(found.values())).to(dtype)

    def _rows(self, first: int, end: int) -> Numbers:
        found = self._held or self._read()
        if isinstance(found, Tensor):
            raise TypeError("a matrix of numbers is no matrix of integers")
        self._held = None if end == len(found.numbers) else found
        return Numbers(*(part[first:end] for part in found))


def read_state(
    folder: Path, config: Any, dtype: torch.dtype, keeps_integers: bool
) -> tuple[dict[str, Tensor], dict[str, LayerMatrix]]:
    """The weights that are read, by name, and the matrices of integers, by module; raises ValueError."""
    stated = quantisation_of(config)
    method = _READ[stated["quant_method"]]
    files = {name: path for path in weight_files(folder) for name in _names(path)}
    layers = {name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in _OF_LAYERS}
    state: dict[str, Tensor] = {}
    unread: dict[str, LayerMatrix] = {}
    for layer in sorted(layers):
        names = [name for name in files if name.rpartition(".")[0] == layer and not name.endswith(".bias")]
        if unknown := [name for name in names if name.rpartition(".")[2] not in (*_OF_LAYERS, *_IGNORED, "weight")]:
            raise ValueError(f"{folder} has {unknown[0]}, which is not known")

        def read(names: list[str] = names) -> Numbers | Tensor:
            return method({name.rpartition(".")[2]: _tensor(files[name], name) for name in names}, stated)

        found = read()
        matrix = LayerMatrix(stated["quant_method"], read, found)
        if isinstance(found, Numbers) and keeps_integers:
            unread[layer] = matrix
        else:
            state[f"{layer}.weight"] = matrix.values(dtype)
    for name, path in files.items():
        place, _, part = name.rpartition(".")
        if part not in _IGNORED and (place not in layers or part == "bias"):
            tensor = _tensor(path, name)
            if tensor.dtype not in _PLAIN:
                raise ValueError(f"{path}: {name} is of {tensor.dtype}, without a scale that is known")
            state[name] = tensor.to(dtype)
    return state, unread


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        found: Tensor = file.get_tensor(name)
        return found


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """The halves of bytes of int32 [n, m] as uint8 [n, 8 m]; `order`: of each its place among the eight."""
    parts = words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    return parts[:, :, torch.tensor(order).argsort()].flatten(1).to(torch.uint8)


def _of_groups(numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Numbers:
    """Rows of integers [out, in] with scales, and zero points where these are not 0, [out, groups], in groups of 32."""
    size = numbers.shape[1] // scales.shape[1]
    if size % GROUP or numbers.shape[1] % GROUP:
        raise ValueError(f"groups of {size} of {numbers.shape[1]} inputs are not served; multiples of {GROUP} are")
    scales = scales.float()
    minimums = None if zeros is None else scales * zeros.float()
    wide = [part.repeat_interleave(size // GROUP, 1).numpy() for part in (scales, minimums) if part is not None]
    return Numbers(numbers.to(torch.int8).numpy(), wide[0], wide[1] if zeros is not None else wide[0][:, :0])


def _gptq(parts: Parts, stated: Mapping[str, Any]) -> Numbers | Tensor:
    _check(stated, bits=(4,))
    numbers = _nibbles(parts["qweight"].t().contiguous())
    zeros = _nibbles(parts["qzeros"]).t() + (0 if stated.get("checkpoint_format") == "gptq_v2" else 1)
    scales, groups = parts["scales"].t(), parts.get("g_idx")
    size = numbers.shape[1] // scales.shape[1]
    if groups is None or torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // size):
        return _of_groups(numbers, scales, zeros)
    # Ordered by their activations: neighbours belong to different groups.
    places = groups.long()
    return (numbers.float() - zeros.float()[:, places]) * scales.float()[:, places]


def _awq(parts: Parts, stated: Mapping[str, Any]) -> Numbers:
    _check(stated, bits=(4,))
    if (version := str(stated.get("version", "gemm")).lower()) != "gemm":
        raise ValueError(f"AWQ of version {version!r} is not served; gemm is")
    numbers, zeros = (_nibbles(parts[name], _AWQ_ORDER).t().contiguous() for name in ("qweight", "qzeros"))
    return _of_groups(numbers, parts["scales"].t(), zeros)


def _compressed(parts: Parts, stated: Mapping[str, Any]) -> Numbers | Tensor:
    if "weight_g_idx" in parts or stated.get("transform_config"):
        raise ValueError("compressed-tensors with transforms, or ordered by activations, are not served")
    scales, zeros, words = parts.get("weight_scale"), parts.get("weight_zero_point"), parts.get("weight_packed")
    if words is None:
        weight = parts["weight"]
        if weight.dtype == torch.int8 and scales is not None and zeros is None:
            return _of_groups(weight, scales.reshape(len(weight), -1), None)
        if weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            groups = (stated.get("config_groups") or {}).values()
            blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
            return _fp8(parts, {**stated, "weight_block_size": next(filter(None, blocks), None)})
        raise ValueError(f"compressed-tensors of {weight.dtype} with zero points are not served")
    if scales is None or words.shape[1] * 8 != int(parts.get("weight_shape", torch.tensor([0, words.shape[1] * 8]))[1]):
        raise ValueError("compressed-tensors of other than 4 bits in words are not served")
    offset = torch.full_like(scales, 8)
    if zeros is not None:
        offset = _nibbles(zeros.t().contiguous()).t()[: len(scales)] if zeros.dtype == torch.int32 else zeros + 8
    if offset.shape != scales.shape:
        raise ValueError("compressed-tensors whose zero points do not fit their scales are not served")
    return _of_groups(_nibbles(words), scales, offset)


def _fp8(parts: Parts, stated: Mapping[str, Any]) -> Tensor:
    weight = parts["weight"].float()
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if scales is None:
        raise ValueError("a layer of fp8 has no scale")
    scales = scales.float()
    if scales.numel() == 1:
        return weight * scales.reshape(())
    block = stated.get("weight_block_size")
    if block is not None and scales.dim() == 2:
        wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return weight * wide[: weight.shape[0], : weight.shape[1]]
    if scales.numel() != len(weight):
        raise ValueError(f"fp8 of {list(weight.shape)} with scales {list(scales.shape)} is not served")
    return weight * scales.reshape(-1, 1)


def _check(stated: Mapping[str, Any], bits: tuple[int, ...]) -> None:
    if (own := stated.get("bits", stated.get("w_bit"))) not in bits:
        raise ValueError(f"{stated['quant_method']} of {own} bits is not served; of {bits[0]} bits it is")


_READ: Mapping[str, Callable[[Parts, Mapping[str, Any]], Numbers | Tensor]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}
METHODS = tuple(_READ)
