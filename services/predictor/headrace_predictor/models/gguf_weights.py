"""The weights of a model in a GGUF file, with the names, rows and norms that transformers' class has.

llama.cpp's names are in its gguf-py/gguf/tensor_mapping.py; its conversion scripts reorder the rows of queries and keys
for its own kind of rotation, and add one to Gemma's norms. Matrices of quantised blocks are read when a runner needs
them: those that it streams stay as they are, the rest become numbers of the model's dtype.

The quantised blocks become numbers with scales and minimums. Their layouts are those of ggml-common.h and ggml-quants.c
(https://github.com/ggml-org/ggml/blob/master/src). Rows of bytes [n, blocks, size] become what cpu/grouped.py has, and
nothing is rounded, because a product of two stored scales has at most 24 bits.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import GGUF, TensorPlace
from headrace_predictor.engine.cpu.grouped import GroupedMatrix, Numbers
from headrace_predictor.engine.state.cache import Array

_ROWS_AT_ONCE = 1024
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}
_EXPERTS = "ffn_{}_exps"
_TURNED = ("llama", "mixtral", "granite", "smollm3")  # Their queries and keys have llama.cpp's order.
_READ_ELSEWHERE = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.((attn_rot_embd|rope_freqs)\..*"
    r"|ffn_(gate|up|down)_exps\.weight)"
)
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# By type, the index of its kind in KINDS of cpu/grouped.py.
KINDS_OF = {"Q4_0": 0, "Q4_1": 0, "Q4_K": 0, "Q5_0": 1, "Q8_0": 1, "Q5_1": 2, "Q5_K": 2, "Q6_K": 3}


def unpack(kind: str, rows: Array) -> Numbers:
    """The numbers of uint8 rows [n, bytes] of a type such as Q4_K."""
    unpack_one, size = _UNPACK[kind]
    return unpack_one(rows.reshape(len(rows), -1, size))


def _half(blocks: Array, first: int) -> Array:
    """The float16 at a place of each block, as float32 [n, blocks]."""
    return np.ascontiguousarray(blocks[:, :, first : first + 2]).view(np.float16)[:, :, 0].astype(np.float32)


def _numbers(numbers: Array, scales: Array, minimums: Array | None = None) -> Numbers:
    rows = len(numbers)
    own = np.empty((rows, 0), np.float32) if minimums is None else minimums.reshape(rows, -1)
    return Numbers(numbers.reshape(rows, -1).astype(np.int8), scales.reshape(rows, -1), own)


def _nibbles(bytes_: Array) -> Array:
    """The low halves of the bytes [..., n], then the high ones."""
    return np.concatenate((bytes_ & 15, bytes_ >> 4), axis=-1)


def _fifth_bits(blocks: Array) -> Array:
    """The fifth bits of a block's 32 numbers, times 16."""
    bits = np.unpackbits(np.ascontiguousarray(blocks), axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Array) -> Numbers:
    scales = _half(blocks, 0)
    return _numbers(_nibbles(blocks[:, :, 2:]), scales, scales * 8)


def _q4_1(blocks: Array) -> Numbers:
    return _numbers(_nibbles(blocks[:, :, 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Array) -> Numbers:
    numbers = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return _numbers(numbers.astype(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Array) -> Numbers:
    numbers = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return _numbers(numbers, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Array) -> Numbers:
    return _numbers(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8), _half(blocks, 0))


def _scales_of(blocks: Array) -> tuple[Array, Array]:
    """Scales and minimums of the eight groups of a block, from 6 bits each and the block's two numbers."""
    low, middle, high = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1).astype(np.float32)
    minimums = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1).astype(np.float32)
    return scales * _half(blocks, 0)[:, :, None], minimums * _half(blocks, 2)[:, :, None]


def _q4_k(blocks: Array) -> Numbers:
    parts = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)
    return _numbers(_nibbles(parts), *_scales_of(blocks))


def _q5_k(blocks: Array) -> Numbers:
    parts = blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)
    bits = blocks[:, :, 16:48][:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    numbers = _nibbles(parts).reshape(*blocks.shape[:2], 8, 32) | bits << 4
    return _numbers(numbers, *_scales_of(blocks))


def _q6_k(blocks: Array) -> Numbers:
    low = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = _nibbles(low).reshape(*blocks.shape[:2], 2, 4, 32) | high << 4
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    return _numbers(numbers.astype(np.int8) - np.int8(32), scales * _half(blocks, 208)[:, :, None])


_UNPACK: Mapping[str, tuple[Callable[[Array], Numbers], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}


@dataclass(frozen=True)
class StoredMatrix:
    """A tensor of two dimensions; row i of the model is row `order[i]` of the file."""

    place: TensorPlace
    order: Array | None = None

    def bytes_of(self, first: int, end: int) -> Array:
        """The bytes of rows, uint8 [n, bytes]."""
        rows, width = self.place.shape[0], self.place.size // self.place.shape[0]
        data = np.memmap(self.place.path, np.uint8, "r", self.place.begin, (rows, width))
        return np.asarray(data[first:end]) if self.order is None else data[self.order[first:end]]

    def numbers(self, first: int, end: int) -> Numbers:
        return unpack(self.place.type.name, self.bytes_of(first, end))

    def values(self, dtype: torch.dtype) -> Tensor:
        """All of it, as numbers of a dtype."""
        rows, inputs = self.place.shape
        out = torch.empty(rows, inputs, dtype=dtype)
        for first in range(0, rows, _ROWS_AT_ONCE):
            end = min(first + _ROWS_AT_ONCE, rows)
            out[first:end] = self._values(first, end)
        return out

    def _values(self, first: int, end: int) -> Tensor:
        name = self.place.type.name
        if name in KINDS_OF:
            return torch.from_numpy(self.numbers(first, end).values())
        own = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return torch.from_numpy(np.array(self.bytes_of(first, end))).view(own)

    @property
    def kind(self) -> str:
        return self.place.type.name.lower()

    @property
    def grouped(self) -> GroupedMatrix:
        """As it is; for quantised blocks."""
        rows, inputs = self.place.shape
        return GroupedMatrix(KINDS_OF[self.place.type.name], rows, inputs, self.numbers)


def has_gguf(folder: Path) -> bool:
    """Whether a folder was made of a GGUF file."""
    return (folder / WEIGHTS_FILE).is_symlink()


def read_state(file: GGUF, config: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, StoredMatrix]]:
    """The weights that are read, by name, and the matrices of quantised ones, by module; raises ValueError."""
    state: dict[str, Tensor] = {}
    unread: dict[str, StoredMatrix] = {}
    for name, matrix in _matrices(file, config, dtype):
        if isinstance(matrix, StoredMatrix):
            unread[name.removesuffix(".weight")] = matrix
        else:
            state[name] = matrix.to(dtype)
    return state, unread


def _matrices(file: GGUF, config: Any, dtype: torch.dtype) -> Iterator[tuple[str, StoredMatrix | Tensor]]:
    """The weights by transformers' names."""
    kind = config.model_type
    names = {**_LAYER, **_OWN.get(kind, {})}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if kind in _TURNED else {}
    for name, place in file.tensors.items():
        if _READ_ELSEWHERE.fullmatch(name):
            continue
        outer, _, what = name.rpartition(".")
        stem, own, order = outer, _OUTER.get(outer), None
        if match := _BLOCK.fullmatch(name):
            stem, what = match[2], match[3]
            own = f"model.layers.{match[1]}.{names[stem]}" if stem in names else None
        if own is None:
            raise ValueError(f"{file.path} has tensor {name[:64]}, which is not known")
        if stem in heads:
            order = _order(file, name, heads[stem])
        stored = StoredMatrix(place if len(place.shape) == 2 else _row(place), order if len(place.shape) == 2 else None)
        if len(place.shape) == 2 and place.type.name in KINDS_OF:
            yield f"{own}.{what}", stored
            continue
        values = stored.values(dtype if len(place.shape) == 2 else torch.float32)
        if len(place.shape) == 1:
            values = values[0] if order is None else values[0][torch.from_numpy(order)]
        if kind.startswith("gemma") and own.endswith("norm"):
            values = values - 1
        yield f"{own}.{what}", values
    if any("_exps." in name for name in file.tensors):
        yield from _experts(file, config, dtype)


def _experts(file: GGUF, config: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer are one tensor; the class has gates and what they open in one."""

    def values(layer: int, name: str) -> Tensor:
        place = file.tensors.get(f"blk.{layer}.{_EXPERTS.format(name)}.weight")
        if place is None or len(place.shape) != 3:
            raise ValueError(f"{file.path} lacks the experts of layer {layer}")
        flat = TensorPlace(place.path, place.type, (place.shape[0] * place.shape[1], place.shape[2]), place.begin)
        return StoredMatrix(flat).values(dtype).view(place.shape)

    for layer in range(config.num_hidden_layers):
        own = f"model.layers.{layer}.mlp.experts."
        yield f"{own}gate_up_proj", torch.cat((values(layer, "gate"), values(layer, "up")), dim=1)
        yield f"{own}down_proj", values(layer, "down")


def _row(place: TensorPlace) -> TensorPlace:
    if len(place.shape) != 1:
        raise ValueError(f"{place.path} has a tensor of {len(place.shape)} dimensions, which is not known")
    return TensorPlace(place.path, place.type, (1, *place.shape), place.begin)


def _order(file: GGUF, name: str, heads: int) -> Array:
    """The rows of the file in the order of transformers, which rotates halves of a head; llama.cpp rotates pairs."""
    rows = file.tensors[name].shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{file.path} has tensor {name[:64]} of {rows} rows, which are not {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
