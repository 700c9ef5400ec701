"""The modules that sentence-transformers runs on a transformer's output, as functions of named tensors.

Each reads and writes `Features`: `token_embeddings` [rows, tokens, hidden], then `sentence_embedding` or `scores`
[rows, size], all in float32. Modules and options that are not here raise ValueError. Source: sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from millrace.models.sentence_files import Module
from millrace.models.sources import read_config
from millrace.oip.row_outputs import POOLING_MASK
from services.predictor.tensor_models.rows import ATTENTION_MASK

Features = dict[str, Tensor]
Step = Callable[[Features], None]

TOKENS, SENTENCE, SCORES, CAUSAL = "token_embeddings", "sentence_embedding", "scores", "causal_logits"
LAYERS = "all_layer_embeddings"  # [layers, rows, tokens, hidden], where the model's configuration asks for them.
_WEIGHTS_FILE = "model.safetensors"
_TINY = 1e-9

Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # Of states, mask and the tokens' positions in their rows, from 1.


def _first(states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), mask.argmax(1)]


def _last(states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), (mask * positions).argmax(1)]


def _max(states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return states.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)


def _mean(states: Tensor, weights: Tensor, positions: Tensor, power: float = 1.0) -> Tensor:
    return (states * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=_TINY) ** power


def _weighted_mean(states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    return _mean(states, mask * positions, positions)


# Each with its flag in the files of earlier versions, in the order in which several flags are concatenated.
_WAYS: Mapping[str, tuple[Way, str]] = {
    "cls": (_first, "pooling_mode_cls_token"),
    "max": (_max, "pooling_mode_max_tokens"),
    "mean": (_mean, "pooling_mode_mean_tokens"),
    "mean_sqrt_len_tokens": (partial(_mean, power=0.5), "pooling_mode_mean_sqrt_len_tokens"),
    "weightedmean": (_weighted_mean, "pooling_mode_weightedmean_tokens"),
    "lasttoken": (_last, "pooling_mode_lasttoken"),
}


def pool(ways: Sequence[Way], features: Features) -> None:
    """Concatenates the poolings of a row's tokens where its pooling mask is 1."""
    mask = features[ATTENTION_MASK]
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) - mask.argmax(1, keepdim=True)
    pooled = features[POOLING_MASK].float()
    features[SENTENCE] = torch.cat([way(features[TOKENS], pooled, positions) for way in ways], 1)


MEAN_POOLING: Step = partial(pool, [_mean])  # Of a folder without modules.


def step_of(module: Module, device: torch.device) -> Step:
    """The step of a module behind the transformer; raises ValueError, and errors for damaged files."""
    make = _STEPS.get(module.kind)
    if make is None:
        raise ValueError(f"its module {module.kind} is not served, only {', '.join(_STEPS)}")
    return make(module, read_config(module.folder, "config.json"), device)


def _pooling(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    named = config.get("pooling_mode")
    flags = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    unknown = [flag for flag in flags if all(flag != known for _, known in _WAYS.values())]
    names = [named] if isinstance(named, str) else named or unknown
    names = names or [way for way, (_, flag) in _WAYS.items() if flag in flags] or ["mean"]
    if odd := [name for name in names if name not in _WAYS]:
        raise ValueError(f"its pooling {odd[0]} is not one of {', '.join(_WAYS)}")
    return partial(pool, [_WAYS[name][0] for name in names])


def _dense(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    weights = _weights(module, device)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(torch.nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
        raise ValueError(f"the activation {name} of its Dense is not torch's own")
    activate = activation()
    read, written = _names(config)

    def apply(features: Features) -> None:
        result = activate(functional.linear(features[read], weights["linear.weight"], weights.get("linear.bias")))
        if config.get("use_residual"):
            projection = weights.get("residual.weight")
            result += features[read] if projection is None else functional.linear(features[read], projection)
        features[written] = result

    return apply


def _layer_norm(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    weights = _weights(module, device)
    scale, shift = weights["norm.weight"], weights["norm.bias"]

    def apply(features: Features) -> None:
        features[SENTENCE] = functional.layer_norm(features[SENTENCE], scale.shape, scale, shift)

    return apply


def _weighted_layers(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    weights = _weights(module, device)["layer_weights"]

    def apply(features: Features) -> None:
        if LAYERS in features:
            layers = features[LAYERS][config.get("layer_start", 4) :]
            features[TOKENS] = torch.tensordot(weights, layers, 1) / weights.sum()

    return apply


def _normalize(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    read, written = _names(config)

    def apply(features: Features) -> None:
        features[written] = functional.normalize(features[read], dim=-1)

    return apply


def _logit_score(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    def apply(features: Features) -> None:  # The model gives only the logits of these tokens: see encoder_loading.py.
        logits = _last(features[CAUSAL], features[ATTENTION_MASK], torch.arange(features[CAUSAL].shape[1]).to(device))
        features[SCORES] = logits[:, :1] - logits[:, 1:].sum(1, keepdim=True)

    return apply


def _dropout(module: Module, config: Mapping[str, Any], device: torch.device) -> Step:
    return lambda features: None


_STEPS: Mapping[str, Callable[[Module, Mapping[str, Any], torch.device], Step]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": _dropout,
    "WeightedLayerPooling": _weighted_layers,
    "LogitScore": _logit_score,
}


def _names(config: Mapping[str, Any]) -> tuple[str, str]:
    read = str(config.get("module_input_name") or SENTENCE)
    return read, str(config.get("module_output_name") or read)


def _weights(module: Module, device: torch.device) -> dict[str, Tensor]:
    path = module.folder / _WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"its module {module.kind} has no {_WEIGHTS_FILE} in {module.folder.name}")
    return {name: tensor.to(device, torch.float32) for name, tensor in load_file(path).items()}
