"""What a proof changes in the model that it runs, until it has ended: limits, layers, the width of numbers."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.engine.runners.streamed import GATED_MODELS

_LAYERS = 2  # Of each kind, where a model has nothing but equal layers.
_LOGITS = 4096
# Attributes of configurations and modules that are numbers of positions or of tokens, and their values in the test.
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "attention_chunk_size")
_LIMITS = {
    **dict.fromkeys(WINDOWS, 8),
    "original_max_position_embeddings": 10,
    "floor_scale": 4,
    "relative_attention_max_distance": 20,
    "index_topk": 6,
    "keep_window_size": 6,
    "expert_capacity": 4,
}
# Of an index that selects blocks: elsewhere other sizes have these names.
_OF_BLOCKS = {"block_size": 4, "topk_blocks": 1}
# Where positions are scaled dynamically; elsewhere the number of positions in a table.
_GROWING = {"max_position_embeddings": 10, "original_max_seq_len": 10, "max_seq_len_cached": 10}


@contextmanager
def widened(model: Any, narrow_dtype: torch.dtype, dtype: torch.dtype) -> Iterator[None]:
    """Computes in wider numbers, where an id has the same experts in every batch; one layer's weights at once."""
    own: dict[Any, list[tuple[Any, str, Any]]] = {}
    modules = [*model.modules()]
    layers = {layer for module in modules if isinstance(module, torch.nn.ModuleList) for layer in module}

    def widen(module: Any, _: Any) -> None:
        for part in module.modules() if module in layers else [module]:
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.dtype is narrow_dtype:
                    own.setdefault(module, []).append((part, name, parameter))
                    part._parameters[name] = torch.nn.Parameter(parameter.to(dtype), requires_grad=False)

    def narrow(module: Any, *_: Any) -> None:
        for part, name, parameter in own.pop(module, ()):
            part._parameters[name] = parameter

    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(narrow, always_call=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def few_layers(model: Any) -> Iterator[None]:
    """Leaves out what repeats in a gated decoder: layers after the second of each kind, on the CPU most of the logits.

    Rounding adds up over the layers, so float32 would be asked about most deep models of bfloat16. The output layer of
    a large vocabulary would take most of the proof's time.
    """
    if type(model) not in GATED_MODELS:
        yield
        return
    decoder, whole, outputs = model.model, model.model.layers, model.lm_head.weight
    decoder.layers = whole[: proven_layers(model)]
    if model.device.type == "cpu":
        model.lm_head.weight = torch.nn.Parameter(outputs[:_LOGITS], requires_grad=False)
    try:
        yield
    finally:
        decoder.layers, model.lm_head.weight = whole, outputs


def proven_layers(model: Any) -> int:
    """How many layers of a gated decoder the proof computes: up to the second of each kind."""
    kinds = _kinds(model)
    return max(i + 1 for i, kind in enumerate(kinds) if kinds[:i].count(kind) < _LAYERS)


def repeat_reaches(model: Any) -> None:
    """Gives the layers that `few_layers` leaves out the reach of the first of their kind."""
    if type(model) in GATED_MODELS:
        first: dict[str, Any] = {}
        for kind, layer in zip(_kinds(model), model.model.layers, strict=True):
            layer.self_attn.reach = first.setdefault(kind, layer.self_attn).reach


def _kinds(model: Any) -> list[str]:
    """The kind of each layer of a gated decoder."""
    count = len(model.model.layers)
    return (getattr(model.config, "layer_types", None) or [""] * count)[:count]


@contextmanager
def near_limits(
    model: Any, rotary: SequenceRotary | None, far: int, names: Collection[str] | None = None
) -> Iterator[bool]:
    """Sets limits below `far` positions and beyond the test, of `names` or all, to a few positions; gives whether there
    is any."""
    grows = rotary is not None and rotary.scaling.grows
    config = model.config
    holders = [vars(one) for one in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values()]
    scalings = [holder["rope_parameters"] for holder in holders if isinstance(holder.get("rope_parameters"), dict)]
    scalings += [own for one in scalings for own in one.values() if isinstance(own, dict)]
    holders += [*scalings, *(vars(module) for module in model.modules())]
    changed = []
    for holder in holders:
        limits = _LIMITS | (_GROWING if grows else {}) | (_OF_BLOCKS if "topk_blocks" in holder else {})
        for name, near in limits.items():
            value = holder.get(name)
            if isinstance(value, int) and near < value < far and (names is None or name in names):
                changed.append((holder, name, value))
                holder[name] = near
    # Dynamically scaled modules replace theirs.
    buffers = [(module, dict(module._buffers)) for module in model.modules() if hasattr(module, "rope_type")]
    try:
        yield bool(changed)
    finally:
        for holder, name, value in changed:
            holder[name] = value
        for module, own in buffers:
            module._buffers.update(own)
