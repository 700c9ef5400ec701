"""What transformers has in config.json, from a GGUF file's metadata and tensors.

Only architectures whose computation llama.cpp and transformers share. What a file of such an architecture states and
its class cannot compute is refused. Source of the keys: llama.cpp's gguf-py/gguf/constants.py and conversion scripts.
"""

import math
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from headrace.models.gguf.reader import GGUF

_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_MOST_LAYERS = 4096
_BETAS = (("fast", 32.0), ("slow", 1.0))  # YaRN's.
# Llama 3.1's rule, with which llama.cpp makes `rope_freqs.weight`.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


def config_of(file: GGUF, vocabulary: int) -> dict[str, Any]:
    """The contents of config.json; `vocabulary`: the tokens of the tokenizer; raises ValueError."""
    architecture = file.get("general.architecture", str, "")
    make = _MAKERS.get(architecture)
    if make is None:
        raise ValueError(
            f"{file.path}: architecture {architecture[:64]!r} is not served from GGUF; these are: {', '.join(_MAKERS)}"
        )
    stated = _Stated(file, architecture)
    if stated.number("pooling_type", 0) or not stated.flag("attention.causal"):
        raise ValueError(f"{file.path} is a model of embeddings or scores, which are not served from GGUF")
    try:
        config = make(stated, vocabulary)
    except ArithmeticError:  # Of sizes that are 0, and numbers that are far too small.
        raise ValueError(f"{file.path}: no sizes of heads follow from the metadata") from None
    if file.tensors:
        _compare(file, config)
    return config


def _compare(file: GGUF, config: Mapping[str, Any]) -> None:
    """Checks that the tensors have the sizes which the metadata states: a class is built by these."""
    size, head_size = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{name}_heads"] * head_size for name in ("attention", "key_value"))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    sizes = {
        "token_embd": (config["vocab_size"], size),
        "attn_q": (queries, size),
        "attn_k": (keys, size),
        "attn_qkv": (queries + 2 * keys, size),
        "attn_output": (size, queries),
        "ffn_down": (size, config["intermediate_size"]),
        "ffn_down_exps": (config.get("num_local_experts", config.get("num_experts")), size, inner),
    }
    for name, place in file.tensors.items():
        own = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith(".weight") and own in sizes and place.shape != sizes[own]:
            raise ValueError(f"{file.path}: tensor {name[:64]} is {place.shape}, by the metadata {sizes[own]}")
    for layer in range(config["num_hidden_layers"]):
        if f"blk.{layer}.attn_norm.weight" not in file.tensors:
            raise ValueError(f"{file.path} lacks layer {layer} of {config['num_hidden_layers']}")


class _Stated:
    """The metadata of an architecture."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file = file
        self._prefix = architecture

    def number(self, name: str, default: float | None = None, of: type = int) -> Any:
        """A number, of lists that of all layers; raises ValueError where it is missing or has no sense."""
        value = self.file.get(f"{self._prefix}.{name}", (int, float, array), default)
        if isinstance(value, array):
            if len(set(value)) != 1:
                raise ValueError(f"{self.file.path}: {name} differs by layer, which is not served")
            value = value[0]
        if value is None:
            raise ValueError(f"{self.file.path} lacks {self._prefix}.{name}")
        if not math.isfinite(value) or not 0 <= value < 1 << 40:
            raise ValueError(f"{self.file.path}: {name} is {value}")
        return of(value)

    def real(self, name: str, default: float = 0.0) -> float:
        return float(self.number(name, default, of=float))

    def flag(self, name: str) -> bool:
        return bool(self.file.get(f"{self._prefix}.{name}", bool, True))

    def layers(self, every: int) -> list[str]:
        """Which layers have a window: of each `every` all but the last, unless the file says otherwise."""
        key, count = "attention.sliding_window_pattern", min(self.number("block_count"), _MOST_LAYERS)
        pattern = self.file.get(f"{self._prefix}.{key}", (int, array), every)
        if isinstance(pattern, int):
            pattern = [pattern < 1 or index % pattern < pattern - 1 for index in range(count)]
        if len(pattern) < count:
            raise ValueError(f"{self.file.path}: {key} is damaged")
        return ["sliding_attention" if slides else "full_attention" for slides in pattern[:count]]

    def text(self, name: str) -> str:
        return str(self.file.get(f"{self._prefix}.{name}", str, ""))

    def has(self, *tensors: str) -> bool:
        return any(name in self.file.tensors for name in tensors)

    def factors(self, tensor: str) -> list[float]:
        place = self.file.tensors[tensor]
        if place.type.name != "F32" or place.size > 1 << 16:
            raise ValueError(f"{self.file.path}: tensor {tensor} is damaged")
        return [float(one) for one in np.fromfile(place.path, np.float32, place.size // 4, offset=place.begin)]


def _decoder(stated: _Stated, vocabulary: int, kind: str, model_type: str, **more: Any) -> dict[str, Any]:
    """What all decoders have."""
    size, heads = stated.number("embedding_length"), stated.number("attention.head_count")
    head_size = stated.number("attention.key_length", stated.number("rope.dimension_count", size // max(1, heads)))
    if stated.number("attention.value_length", head_size) != head_size:
        raise ValueError(f"{stated.file.path}: keys and values of different sizes are not served")
    embedding = stated.file.tensors.get("token_embd.weight")
    return {
        "architectures": [kind],
        "model_type": model_type,
        "hidden_size": size,
        "intermediate_size": stated.number("feed_forward_length"),
        "num_hidden_layers": min(stated.number("block_count"), _MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": stated.number("attention.head_count_kv", heads),
        "head_dim": head_size,
        "rms_norm_eps": stated.number("attention.layer_norm_rms_epsilon", of=float),
        "max_position_embeddings": stated.number("context_length"),
        "vocab_size": vocabulary if embedding is None else embedding.shape[0],
        "tie_word_embeddings": not stated.has("output.weight"),
        "rope_parameters": _rotary(stated, head_size, rotates_parts=model_type == "phi3"),
        "use_cache": True,
        **more,
    }


def _rotary(stated: _Stated, head_size: int, rotates_parts: bool = False) -> dict[str, Any]:
    kind = stated.text("rope.scaling.type")
    own: dict[str, Any] = {"rope_theta": stated.real("rope.freq_base", 10000.0)}
    context = stated.number("context_length")
    rotated = stated.number("rope.dimension_count", head_size)
    if rotated != head_size:
        if not rotates_parts:
            raise ValueError(
                f"{stated.file.path} rotates {rotated} of {head_size} numbers of a head, which is not served"
            )
        own["partial_rotary_factor"] = rotated / head_size
    if stated.has("rope_factors_long.weight"):
        original = stated.number("rope.scaling.original_context_length", context)
        factors = {f"{name}_factor": stated.factors(f"rope_factors_{name}.weight") for name in ("long", "short")}
        scaling = {"factor": context / max(1, original), "original_max_position_embeddings": original}
        scaling["attention_factor"] = stated.real("rope.scaling.attn_factor", 1.0)
        return own | {"rope_type": "longrope"} | factors | scaling
    # Of files without a kind it is linear, in old ones by another name.
    factor = stated.real("rope.scaling.factor", stated.real("rope.scale_linear", 1.0))
    is_plain, has_factors = kind == "none" or factor in (0.0, 1.0), stated.has("rope_freqs.weight")
    if (has_factors and not is_plain) or (kind != "yarn" and stated.real("rope.scaling.attn_factor", 1.0) != 1):
        raise ValueError(f"{stated.file.path} scales positions by two rules at once, which is not served")
    if has_factors:
        return own | _of_factors(stated.factors("rope_freqs.weight"), own["rope_theta"], head_size, context)
    if is_plain:
        return own | {"rope_type": "default"}
    if kind in ("", "linear"):
        return own | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = stated.number("rope.scaling.original_context_length", context)
        own |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        attention = stated.real("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
        fast, slow = (stated.real(f"rope.scaling.yarn_beta_{name}", beta) for name, beta in _BETAS)
        return own | {"attention_factor": attention, "beta_fast": fast, "beta_slow": slow}
    raise ValueError(f"{stated.file.path}: rope.scaling.type {kind[:64]!r} is not served")


def _of_factors(factors: list[float], base: float, head_size: int, context: int) -> dict[str, Any]:
    """Llama 3's scaling where that gives the factors, else these."""
    if len(factors) != head_size // 2:
        raise ValueError("rope_freqs.weight does not fit the heads")
    largest = max(factors)
    waves = 2 * math.pi * base ** (np.arange(0, head_size, 2) / head_size)
    smooth = np.clip((_ORIGINAL / waves - _LOW) / (_HIGH - _LOW), 0, 1)
    if largest and np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=1e-4):
        limits = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": _ORIGINAL}
        return {"rope_type": "llama3", "factor": largest, **limits}
    both = {"long_factor": factors, "short_factor": factors, "original_max_position_embeddings": context}
    return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **both}


def _llama(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    biases = {"attention_bias": stated.has("blk.0.attn_q.bias"), "mlp_bias": stated.has("blk.0.ffn_gate.bias")}
    if stated.number("expert_count", 0):
        experts = {"num_local_experts": stated.number("expert_count")}
        experts["num_experts_per_tok"] = stated.number("expert_used_count")
        return _decoder(stated, vocabulary, "MixtralForCausalLM", "mixtral", **experts)
    return _decoder(stated, vocabulary, "LlamaForCausalLM", "llama", **biases)


def _qwen3_mixture(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    experts = {
        "num_experts": stated.number("expert_count"),
        "num_experts_per_tok": stated.number("expert_used_count"),
        "moe_intermediate_size": stated.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _decoder(stated, vocabulary, "Qwen3MoeForCausalLM", "qwen3_moe", use_sliding_window=False, **experts)


def _phi3(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    window = stated.number("attention.sliding_window", 0) or None
    original = stated.number("rope.scaling.original_context_length", stated.number("context_length"))
    config = _decoder(stated, vocabulary, "Phi3ForCausalLM", "phi3", sliding_window=window)
    # Its heads are as large as the model's size says; a part of each is rotated.
    head_size = config["hidden_size"] // config["num_attention_heads"]
    rotary = _rotary(stated, head_size, rotates_parts=True)
    config |= {"rope_parameters": rotary, "original_max_position_embeddings": original}
    return config | {"head_dim": head_size, "pad_token_id": None}


def _gemma(stated: _Stated, vocabulary: int, kind: str, model_type: str, large: int, **more: Any) -> dict[str, Any]:
    config = _decoder(stated, vocabulary, kind, model_type, **_GELU, **more)
    # llama.cpp knows the largest models by their layers.
    is_large = config["num_hidden_layers"] == large
    scale = config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
    return config | {"query_pre_attn_scalar": scale}


def _gemma2(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    base = stated.real("rope.freq_base", 10000.0)
    if stated.real("rope.freq_base_swa", base) != base:
        raise ValueError(f"{stated.file.path} rotates otherwise within windows, which is not served of gemma2")
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    own: dict[str, Any] = {name: stated.real(name, value) for name, value in caps.items()}
    own |= {"sliding_window": stated.number("attention.sliding_window", 4096), "layer_types": stated.layers(2)}
    return _gemma(stated, vocabulary, "Gemma2ForCausalLM", "gemma2", 46, **own)


def _gemma3(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    window = stated.number("attention.sliding_window", 0)
    cap = stated.real("final_logit_softcapping") or None
    config = _gemma(stated, vocabulary, "Gemma3ForCausalLM", "gemma3_text", 62, sliding_window=window or 1)
    types = stated.layers(6) if window else ["full_attention"] * config["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": stated.real("rope.freq_base_swa", 10000.0)}
    rotary = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return config | {"rope_parameters": rotary, "layer_types": types, "final_logit_softcapping": cap}


def _granite(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    if not stated.flag("rope.scaling.finetuned"):
        raise ValueError(f"{stated.file.path} is a Granite without positions, which is not served")
    config = _decoder(stated, vocabulary, "GraniteForCausalLM", "granite")
    return config | {
        "embedding_multiplier": stated.real("embedding_scale") or 1.0,
        "residual_multiplier": stated.real("residual_scale") or 1.0,
        "attention_multiplier": stated.real("attention.scale") or config["head_dim"] ** -0.5,
        "logits_scaling": stated.real("logit_scale") or 1.0,
    }


def _smollm3(stated: _Stated, vocabulary: int) -> dict[str, Any]:
    rotated = [int((index + 1) % 4 != 0) for index in range(min(stated.number("block_count"), _MOST_LAYERS))]
    return _decoder(stated, vocabulary, "SmolLM3ForCausalLM", "smollm3", no_rope_layers=rotated, pad_token_id=None)


_MAKERS: Mapping[str, Callable[[_Stated, int], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": partial(_decoder, kind="Qwen2ForCausalLM", model_type="qwen2", use_sliding_window=False),
    "qwen3": partial(_decoder, kind="Qwen3ForCausalLM", model_type="qwen3", use_sliding_window=False),
    "qwen3moe": _qwen3_mixture,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "smollm3": _smollm3,
}
