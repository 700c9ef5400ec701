"""The engine's arithmetic with int8 and int4 weights in plain NumPy: what every kernel must give to the last bit.

Each operation is an IEEE float32 operation, rounded by itself, in the order written here. Vectors run over output
channels, heads, positions and sequences; where the order of a sum matters, a loop runs over its terms. Products of
integers are float32 matrix products: all their partial sums are integers below 2^24, so they are exact in any order.

Checkpoints: llama, mistral, qwen2 and qwen3, in float32, float16 or bfloat16. One position of all sequences is computed
at a time, with the keys and values of earlier positions kept.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from headrace_predictor.engine.cpu.angles import cosines_and_sines, inverse_frequencies

Floats = NDArray[np.float32]

GROUP, SMALL_GROUP = 128, 32  # Inputs that share a scale, and a factor of it in int4.
BLOCK = 32  # Positions whose scores and values are summed together.
LANES = 16
ROUNDING = np.float32(12582912.0)  # 1.5 x 2^23: adding it rounds to an integer.
LOWEST = np.float32(-3e38)
LOG2_E = np.float32(1.4426950408889634)
EXP = [1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2]
EXP += [2.402264791363012e-1, 6.931472028550421e-1, 1.0]


def round_to_bfloat16(x: Floats) -> Floats:
    """The nearest bfloat16, even at ties, as float32."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def padded(x: Floats, multiple: int) -> Floats:
    """x with zeros after the end of its last axis, up to a multiple."""
    return np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % multiple), np.float32)], -1)


def exp(x: Floats) -> Floats:
    """Of x <= 0: 2^n times a polynomial, n the integer next to x / ln 2; zero below 2^-126."""
    unbounded = np.maximum(x, np.float32(-1e38)) * LOG2_E
    power = np.maximum(unbounded, np.float32(-126))
    whole = np.trunc(power - np.float32(0.5))
    rest = power - whole
    series = np.full_like(x, EXP[0])
    for coefficient in EXP[1:]:
        series = series * rest + np.float32(coefficient)
    result = series * ((whole.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(unbounded < -126, np.float32(0), result)


def swish(x: Floats) -> Floats:
    """x / (1 + exp(-x)), by powers of which none is above 1."""
    power = exp(-np.abs(x))
    return np.where(x < 0, x * power, x) / (np.float32(1) + power)


def sum_of_lanes(x: Floats) -> Floats:
    """The sum along the last axis: each lane in order, then halves."""
    x = padded(x, LANES).reshape(*x.shape[:-1], -1, LANES)
    total = np.zeros_like(x[..., 0, :])
    for i in range(x.shape[-2]):
        total = total + x[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def rms_norm(x: Floats, weight: Floats, epsilon: np.float32) -> Floats:
    squares = sum_of_lanes(x * x)
    inverse = np.float32(1) / np.sqrt(squares / np.float32(x.shape[-1]) + epsilon)
    return (x * inverse[..., None]) * weight


def quantised_activations(x: Floats) -> tuple[Floats, Floats]:
    """Integers [groups, rows, GROUP] as floats, and scales [groups, rows], of x [rows, inputs]."""
    groups = np.ascontiguousarray(padded(x, GROUP).reshape(len(x), -1, GROUP).swapaxes(0, 1))
    largest = np.abs(groups).max(-1)
    largest = np.where(largest < 2.0**-120, np.float32(0), largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = groups * (np.float32(127) / largest)[..., None]
    rounded = (scaled + ROUNDING) - ROUNDING
    usual = np.isfinite(largest) & (largest > 0)
    scales = np.where(usual, largest / np.float32(127), np.where(largest == 0, np.float32(0), np.float32(np.nan)))
    return np.where(usual[..., None], rounded, np.float32(0)), scales


class Linear:
    """A layer's weight [outputs, inputs] in integers, and its bias."""

    def __init__(self, weight: Floats, bias: Floats | None, four_bits: bool) -> None:
        self.four_bits, self.bias, self.inputs = four_bits, bias, weight.shape[1]
        q, self.scales = quantised_to_4_bits(weight) if four_bits else quantised_to_8_bits(weight)
        # [groups, inputs of a group, outputs]
        self.q = np.ascontiguousarray(padded(q, GROUP).reshape(len(q), -1, GROUP).transpose(1, 2, 0))

    def __call__(self, x: Floats) -> Floats:
        """[rows, inputs] to [rows, outputs]."""
        q, scales = quantised_activations(x)
        total = np.zeros((len(x), self.q.shape[-1]), np.float32)
        for g, scale in enumerate(scales):
            whole = q[g] @ self.q[g]
            total = total + (whole * self.scales[:, g] if self.four_bits else whole) * scale[:, None]
        if not self.four_bits:
            total = total * self.scales
        return total if self.bias is None else total + self.bias

    def rows(self, ids: Sequence[int]) -> Floats:
        """Rows of the weight, as of an embedding."""
        q = self.q[:, :, list(ids)]
        scaled = q * (self.scales[list(ids)].T[:, None] if self.four_bits else self.scales[list(ids)])
        return scaled.reshape(-1, len(ids)).T[:, : self.inputs]


def quantised_to_8_bits(weight: Floats) -> tuple[Floats, Floats]:
    """Integers of the weight's shape, as floats, and scales [outputs]."""
    scales = np.abs(weight).max(-1) / np.float32(127)
    divisors = np.where(scales == 0, np.float32(1), scales)[:, None]
    return np.clip(np.rint(weight / divisors), -127, 127), scales


def quantised_to_4_bits(weight: Floats) -> tuple[Floats, Floats]:
    """Integers [outputs, padded inputs], as floats, and scales [outputs, groups].

    Each is of 4 bits times a factor of its small group: of three factors that with the least error.
    """
    groups = padded(weight, GROUP).reshape(len(weight), -1, GROUP // SMALL_GROUP, SMALL_GROUP)
    extremes = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    bits = (np.abs(extremes) / np.float32(8 * 15)).max((-2, -1)).view(np.uint32)
    scales = ((bits + np.uint32(0xFFFFF)) & np.uint32(0xFFF00000)).view(np.float32)
    units = np.where(scales == 0, np.float32(1), scales)[..., None, None]
    found = np.zeros_like(groups)
    least = np.full(groups.shape[:-1], np.inf, np.float32)
    for step in (-1, 0, 1):
        factors = np.clip(np.rint(np.abs(extremes) / np.float32(8) / units) + np.float32(step), 1, 15)
        factors = np.where(extremes > 0, -factors, factors).astype(np.float32)
        quotients = np.clip(np.rint(groups / (factors * units)), -8, 7)
        squares = np.square(quotients * (factors * units) - groups)
        error = np.zeros_like(least)
        for k in range(SMALL_GROUP):
            error = error + squares[..., k]
        is_better = error < least
        found = np.where(is_better[..., None], quotients * factors, found)
        least = np.where(is_better, error, least)
    return found.reshape(len(weight), -1).astype(np.float32), scales


class Layer:
    def __init__(self, config: dict[str, Any], tensors: dict[str, Floats], index: int, four_bits: bool) -> None:
        def linear(name: str) -> Linear:
            return Linear(tensors[f"{path}{name}.weight"], tensors.get(f"{path}{name}.bias"), four_bits)

        path = f"model.layers.{index}."
        self.query, self.key, self.value, self.output = (linear(f"self_attn.{name}_proj") for name in "qkvo")
        self.gate, self.up, self.down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        self.norms = [tensors[f"{path}{name}_layernorm.weight"] for name in ("input", "post_attention")]
        names = [f"{path}self_attn.{name}_norm.weight" for name in "qk"]
        self.head_norms = [tensors[name] for name in names if name in tensors]
        self.epsilon = np.float32(config["rms_norm_eps"])
        self.size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kinds = config.get("layer_types") or [{"mistral": "sliding_attention"}.get(config["model_type"])]
        self.window = config.get("sliding_window") if kinds[index % len(kinds)] == "sliding_attention" else None

    def __call__(self, hidden: Floats, cache: "Cache", position: int, rotary: tuple[Floats, Floats]) -> Floats:
        normed = rms_norm(hidden, self.norms[0], self.epsilon)
        hidden = self.output(self.attention(normed, cache, position, rotary)) + hidden
        normed = rms_norm(hidden, self.norms[1], self.epsilon)
        return self.down(swish(self.gate(normed)) * self.up(normed)) + hidden

    def attention(self, normed: Floats, cache: "Cache", position: int, rotary: tuple[Floats, Floats]) -> Floats:
        linears = self.query, self.key, self.value
        queries, keys, values = (linear(normed).reshape(len(normed), -1, self.size) for linear in linears)
        if self.head_norms:
            queries, keys = (rms_norm(x, self.head_norms[k], self.epsilon) for k, x in enumerate((queries, keys)))
        queries = turned(queries, rotary) * np.float32(1 / math.sqrt(self.size))
        cache.write(position, turned(keys, rotary), values)
        queries = queries.reshape(*keys.shape[:2], -1, self.size)  # Those that share a key head together.
        first = max(0, position + 1 - self.window) if self.window else 0
        return attended(queries, *cache.read(position + 1), first).reshape(len(normed), -1)


def turned(x: Floats, rotary: tuple[Floats, Floats]) -> Floats:
    cosines, sines = rotary
    half = x.shape[-1] // 2
    near, far = x[..., :half], x[..., half:]
    return np.concatenate([near * cosines - far * sines, far * cosines + near * sines], -1)


def attended(queries: Floats, keys: Floats, values: Floats, first: int) -> Floats:
    """Queries [.., group, size] over keys [.., size, end] and values [end, .., size] from position `first` on."""
    end = keys.shape[-1]
    even, odd = (np.zeros((*queries.shape[:-1], end), np.float32) for _ in range(2))
    for d in range(0, queries.shape[-1], 2):
        even = even + queries[..., d, None] * keys[..., None, d, :]
        odd = odd + queries[..., d + 1, None] * keys[..., None, d + 1, :]
    scores = np.full((*even.shape[:-1], end + -end % BLOCK), LOWEST)
    scores[..., first:end] = (even + odd)[..., first:]
    weights = exp(scores - scores.max(-1, keepdims=True))
    inverses = np.float32(1) / sum_of_lanes(weights)
    products = np.moveaxis(weights[..., :end], -1, 0)[..., None] * values[..., None, :]
    total = np.zeros_like(queries)
    for start in range(0, end, BLOCK):
        odd = np.zeros_like(total)
        for t in range(start, min(start + BLOCK, end)):
            total, odd = (total, odd + products[t]) if t % 2 else (total + products[t], odd)
        total = total + odd
    return total * inverses[..., None]


class Cache:
    """A layer's keys and values of all sequences, in float32 or rounded to bfloat16."""

    def __init__(self, sequences: int, heads: int, size: int, length: int, dtype: str) -> None:
        self.keys = np.zeros((sequences, heads, size, length), np.float32)
        self.values = np.zeros((length, sequences, heads, size), np.float32)
        self.rounded = {"bf16": round_to_bfloat16, "fp32": np.asarray}[dtype]

    def write(self, position: int, keys: Floats, values: Floats) -> None:
        self.keys[..., position], self.values[position] = self.rounded(keys), self.rounded(values)

    def read(self, end: int) -> tuple[Floats, Floats]:
        return self.keys[..., :end], self.values[:end]


class IntegerModel:
    """A checkpoint's folder, its weights "int8" or "int4", its cache "bf16" or "fp32".

    `frequencies`: the inverse frequencies of the rotary embedding, if not the default ones.
    """

    def __init__(self, folder: Path | str, weights: str, cache: str, frequencies: Floats | None = None) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = {name: x for path in Path(folder).glob("*.safetensors") for name, x in tensors_of(path)}
        four_bits = {"int8": False, "int4": True}[weights]
        self.layers = [Layer(config, tensors, i, four_bits) for i in range(config["num_hidden_layers"])]
        self.embedding = Linear(tensors["model.embed_tokens.weight"], None, False)  # As the head, 8 bits in any case.
        head = tensors.get("lm_head.weight")
        self.head = self.embedding if head is None else Linear(head, None, False)
        self.norm, self.epsilon = tensors["model.norm.weight"], np.float32(config["rms_norm_eps"])
        self.dtype, self.key_heads = cache, config["num_key_value_heads"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        default = inverse_frequencies(theta, self.layers[0].size)
        self.frequencies = default if frequencies is None else frequencies

    def generate(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        return self.generate_all([prompt_ids], count)[0]

    def generate_all(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt; the first of equal logits. No token ends an answer."""
        rows = [list(prompt) for prompt in prompts]
        shortest, longest = min(map(len, rows)), max(map(len, rows))
        with threadpool_limits(1):  # For products this small, more threads only wait for each other.
            for position, hidden in enumerate(self.hidden_states(rows, longest + count - 1), 1):
                best = self.head(hidden).argmax(-1).tolist() if position >= shortest else []
                for row, token in zip(rows, best, strict=False):
                    row += [token] if len(row) == position else []
        return [row[len(prompt) : len(prompt) + count] for row, prompt in zip(rows, prompts, strict=True)]

    def logits(self, ids: Sequence[int]) -> Floats:
        """[tokens, vocabulary]."""
        with threadpool_limits(1):
            return self.head(np.concatenate(list(self.hidden_states([list(ids)], len(ids)))))

    def hidden_states(self, rows: list[list[int]], length: int) -> Iterator[Floats]:
        """After the last norm, [sequences, model size] for each position; rows may grow between them."""
        size = self.layers[0].size
        caches = [Cache(len(rows), self.key_heads, size, length, self.dtype) for _ in self.layers]
        cosines, sines = cosines_and_sines(np.arange(length), self.frequencies)
        for position in range(length):
            hidden = self.embedding.rows([row[position] for row in rows])
            for layer, cache in zip(self.layers, caches, strict=True):
                hidden = layer(hidden, cache, position, (cosines[position], sines[position]))
            yield rms_norm(hidden, self.norm, self.epsilon)


def tensors_of(path: Path) -> Iterator[tuple[str, Floats]]:
    """The tensors of a safetensors file in float32."""
    contents = path.read_bytes()
    begin = 8 + int.from_bytes(contents[:8], "little")  # The header's length, and the header.
    for name, entry in json.loads(contents[8:begin]).items():
        if name != "__metadata__":
            first, end = (begin + offset for offset in entry["data_offsets"])
            stored = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[entry["dtype"]]
            x = np.frombuffer(contents[first:end], stored).reshape(entry["shape"])
            yield name, (x.astype(np.uint32) << 16).view(np.float32) if stored == "<u2" else x.astype(np.float32)


def hash_of_tokens(answers: Sequence[Sequence[int]]) -> str:
    """sha256 of the ids of all answers in turn, each int32, little-endian."""
    return hashlib.sha256(b"".join(np.array(answer, "<i4").tobytes() for answer in answers)).hexdigest()
