"""The size of the KV cache, and the context that fits it.

On the CPU the cache may hold one whole context and `_ROOM`, within the model's share of the memory that the weights
leave free, of the machine or below the container's limit. On CUDA the cache gets what is left of `gpu_memory_share`
after the weights: with N predictors on one GPU each gets its share, whatever the order in which they start.
"""

import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.errors import StartupError, StartupFault
from headrace.sampling import CONTEXT_LENGTHS
from headrace_predictor.engine.runners.states import key_layers
from headrace_predictor.engine.state.blocks import RESERVED
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, LayerShape
from headrace_predictor.settings import PredictorSettings

_ROOM = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_LEAST_RUNNING, _MOST_RUNNING, _TOKENS_OF_ONE = 32, 256, 256
_UNSTATED_CONTEXT = 512  # For models without a position table, such as T5's, whose configuration names no length.
_LEAST_CONTEXT = 256
_ALREADY_SCALED = ("longrope", "llama3")  # Kinds of scalings whose configurations state the scaled context.


def cache_shape(model: Any) -> CacheShape:
    """What a model stores for each token, from its configuration."""
    config = model.config.get_text_config(decoder=True)
    own_layers = key_layers(model.config)
    if own_layers == 0:
        return CacheShape(1, 1, 1, model.dtype)  # It has nothing in blocks, which only count its ids.
    count = own_layers or _first(config, "num_decoder_layers", "num_hidden_layers") or 1
    if getattr(config, "is_heterogeneous", False):
        layers = [_layer_shape(one) for one in config.per_layer_config][:own_layers]
    else:
        layers = [_layer_shape(config)] * count
    stored: dict[str, int] = {}  # By type, the layers whose keys and values others use.
    for layer, mode in enumerate(getattr(config, "kv_sharing_modes", None) or ()):
        if mode == "store":
            stored[config.layer_types[layer]] = layer
        elif mode == "reuse":
            layers[layer] = layers[layer]._replace(source=stored.get(config.layer_types[layer]))
    heads, size, value_size, _ = layers[0]
    is_even = len(set(layers)) == 1 and size == value_size
    return CacheShape(count, heads, size, model.dtype, () if is_even else tuple(layers))


def _layer_shape(config: Any) -> LayerShape:
    heads = _first(config, "num_attention_heads", "num_heads") or 1
    if "qk_nope_head_dim" in {field.name for field in fields(config)}:
        # Latent attention stores the keys and values of every head.
        return LayerShape(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    size = _first(config, "head_dim", "d_kv") or (_first(config, "hidden_size", "d_model") or heads) // heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return LayerShape(1, size, size)  # Falcon 7B, whose number of key heads says nothing.
    return LayerShape(_first(config, "num_key_value_heads", "num_kv_heads") or heads, size, size)


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


class MemoryPlan(NamedTuple):
    """Of a model: its own context length and the served one, its blocks with the reserved one, sequences at once."""

    own_context: int
    context: int
    blocks: int
    max_running: int


def plan_memory(
    name: str, model: Any, shape: CacheShape, settings: PredictorSettings, state_bytes: int = 0
) -> MemoryPlan:
    """Plans the memory of a loaded model, whose weights are not packed yet; raises StartupError.

    `state_bytes`: what a sequence needs beside its blocks, outside of `PREDICTOR_KV_CACHE_MEMORY`.
    """
    stated = stated_context(model.config.get_text_config(decoder=True))
    if stated is not None and settings.max_context > stated:
        raise StartupError(f"model {name}: PREDICTOR_MAX_CONTEXT={settings.max_context}, but its context is {stated}")
    own = stated or _UNSTATED_CONTEXT
    # An encoder-decoder model stores the prompt as well as the output, and the decoder's start token.
    copies = 2 if model.config.is_encoder_decoder else 1
    whole = ((settings.max_context or own) + 2 * BLOCK_TOKENS) * copies * shape.bytes_per_token
    # Weights that are still pages of their files count as free, until packing copies them.
    weights = getattr(model, "unread_bytes", 0)
    if model.device.type == "cuda":
        # There already; int8 ones are made of them before the cache is.
        shrinks = [tensor for tensor in model.parameters() if tensor.dim() == 2 and settings.weights == "int8"]
        weights = -sum(tensor.numel() * (tensor.itemsize - 1) for tensor in shrinks)
    elif getattr(model, "are_pages_of_files", True):
        weights += sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
    states = (settings.max_running or _LEAST_RUNNING) * state_bytes
    memory = cache_memory(name, model.device, settings, whole + states, weights)
    most_running = _MOST_RUNNING
    if state_bytes and settings.kv_cache_memory is None:
        one = state_bytes + _TOKENS_OF_ONE * shape.bytes_per_token
        most_running = min(max(memory // one, _LEAST_RUNNING), memory // 2 // state_bytes, _MOST_RUNNING)
        most_running = settings.max_running or max(most_running, 1)
        memory -= most_running * state_bytes
    tokens = max(0, memory // (shape.bytes_per_token * BLOCK_TOKENS) - RESERVED) * BLOCK_TOKENS
    fits = max(0, tokens // copies - (copies - 1))
    needed = settings.max_context or min(own, _LEAST_CONTEXT)
    if fits < needed:
        bytes_needed = (needed + BLOCK_TOKENS) * copies * shape.bytes_per_token
        error = StartupFault if settings.kv_cache_memory is None else StartupError
        raise error(
            f"model {name}: context {needed} needs {bytes_needed / 1e9:.2g} GB, "
            f"have {memory / 1e9:.2g}; raise PREDICTOR_KV_CACHE_MEMORY or lower PREDICTOR_MAX_CONTEXT"
        )
    context = settings.max_context or min(own, fits)
    running = settings.max_running or min(most_running, max(_LEAST_RUNNING, tokens // copies // _TOKENS_OF_ONE))
    # Limited to the blocks that whole contexts of all running requests can fill.
    useful = running * 2 * copies * (context + BLOCK_TOKENS) // BLOCK_TOKENS
    return MemoryPlan(own, context, min(tokens // BLOCK_TOKENS, useful) + RESERVED, running)


def stated_context(config: Any) -> int | None:
    """The longest context that a configuration allows: with scaled positions a multiple, as in vLLM."""
    stated: int | None = next((n for k in CONTEXT_LENGTHS if (n := getattr(config, k, None) or 0) > 0), None)
    scaling = getattr(config, "rope_parameters", None) or {}
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    if stated is None or factor is None or kind in (None, "default", *_ALREADY_SCALED):
        return stated
    original = scaling.get("original_max_position_embeddings", stated) if kind == "yarn" else stated
    return max(stated, int(original * factor))


def cache_memory(
    name: str, device: torch.device, settings: PredictorSettings, whole_context: int = 0, weights: int = 0
) -> int:
    """Bytes for keys and values; raises StartupError if a setting asks for more than there is.

    `whole_context`: the bytes for one; `weights`: bytes that will be taken from the free memory yet, or be freed.
    """
    size = settings.kv_cache_memory
    most: int | None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = int(total * settings.gpu_memory_share) - torch.cuda.memory_reserved(device)
        most = min(share, free) - weights
        if size is None:
            return max(0, most)
    else:
        most = container_memory_left()
        if size is None:
            left = memory_left()
            share = _ROOM if left is None else int((left - weights) * settings.memory_share)
            return max(0, min(_ROOM + whole_context, share))
    if most is not None and size > most:
        raise StartupFault(
            f"model {name}: PREDICTOR_KV_CACHE_MEMORY is {size / 1e9:.2g} GB, "
            f"but only {max(0, most) / 1e9:.2g} are left"
        )
    return int(size)


def memory_left() -> int | None:
    """Bytes that this process may still take: below its container's limit, and free on the machine."""
    found = [container_memory_left()]
    with suppress(OSError):
        found += [int(kib) << 10 for kib in re.findall(r"MemAvailable: +(\d+)", _MEMINFO.read_text())]
    return min((left for left in found if left is not None), default=None)


def container_memory_left(cgroup: Path = _CGROUP) -> int | None:
    """Bytes below the memory limit of this process's container; None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # Cached pages of files, such as the weights', are reclaimed when memory is short.
    cached = sum(int(statistics.get(name, 0)) for name in ("inactive_file", "active_file"))
    return int(limit) - used + cached
