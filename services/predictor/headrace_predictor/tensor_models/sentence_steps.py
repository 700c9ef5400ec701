"""The modules that sentence-transformers runs on a transformer's output, as functions of named tensors.

Each reads and writes `Features`: `token_embeddings` [rows, tokens, hidden], then `sentence_embedding` or `scores`
[rows, size], all in float32. Modules and options that are not here raise ValueError. Source: sentence-transformers 6.2.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from headrace.models.sentence_files import Module
from headrace.models.sources import read_config
from headrace.oip.model_description import POOLING_MASK
from headrace_predictor.tensor_models.encoder_model import ATTENTION_MASK

Features = dict[str, Tensor]
Step = Callable[[Features], None]
Config = Mapping[str, Any]
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # Of states, mask and the tokens' positions in their rows, from 1.

TOKENS, SENTENCE, SCORES, CAUSAL = "token_embeddings", "sentence_embedding", "scores", "causal_logits"
_WEIGHTS_FILE = "model.safetensors"
_TINY = 1e-9


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


def _pool(features: Features, ways: Sequence[Way], read: str = TOKENS, written: str = SENTENCE) -> None:
    """Concatenates the poolings of a row's tokens where its pooling mask is 1."""
    mask = features[ATTENTION_MASK]
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) - mask.argmax(1, keepdim=True)
    pooled = features[POOLING_MASK].float()
    features[written] = torch.cat([way(features[read], pooled, positions) for way in ways], 1)


MEAN_POOLING: Step = partial(_pool, ways=[_mean])  # Of a folder without modules.


def step_of(module: Module, device: torch.device) -> Step:
    """The step of a module behind the transformer; raises ValueError, and other errors for damaged files."""
    make = _STEPS.get(module.kind)
    if make is None:
        raise ValueError(f"its module {module.kind} is not served, only {', '.join(_STEPS)}")
    config, weights = read_config(module.folder, "config.json"), {}
    if module.kind in ("Dense", "LayerNorm"):
        path = module.folder / _WEIGHTS_FILE
        if not path.is_file():
            raise ValueError(f"its module {module.kind} has no {_WEIGHTS_FILE} in {module.folder.name}")
        weights = {name: tensor.to(device, torch.float32) for name, tensor in load_file(path).items()}
    return make(config, weights)


def _pooling(config: Config, weights: Mapping[str, Tensor]) -> Step:
    named = config.get("pooling_mode")
    flags = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    unknown = [flag for flag in flags if all(flag != known for _, known in _WAYS.values())]
    names = [named] if isinstance(named, str) else named or unknown
    names = names or [way for way, (_, flag) in _WAYS.items() if flag in flags] or ["mean"]
    if odd := [name for name in names if name not in _WAYS]:
        raise ValueError(f"its pooling {odd[0]} is not one of {', '.join(_WAYS)}")
    return partial(_pool, ways=[_WAYS[name][0] for name in names])


def _dense(config: Config, weights: Mapping[str, Tensor]) -> Step:
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(torch.nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
        raise ValueError(f"the activation {name} of its Dense is not torch's own")
    activate, weight, bias = activation(), weights["linear.weight"], weights.get("linear.bias")
    residual = weights.get("residual.weight")

    def apply(vectors: Tensor) -> Tensor:
        result: Tensor = activate(functional.linear(vectors, weight, bias))
        if config.get("use_residual"):
            result = result + (vectors if residual is None else functional.linear(vectors, residual))
        return result

    return _mapped(config, apply)


def _layer_norm(config: Config, weights: Mapping[str, Tensor]) -> Step:
    scale, shift = weights["norm.weight"], weights["norm.bias"]
    return _mapped(config, lambda vectors: functional.layer_norm(vectors, scale.shape, scale, shift))


def _difference(states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """The last token's score: its logit of the true token, less that of the false one, if there is one."""
    logits = _last(states, mask, positions)
    return logits[:, :1] - logits[:, 1:].sum(1, keepdim=True)


def _mapped(config: Config, function: Callable[[Tensor], Tensor]) -> Step:
    read = str(config.get("module_input_name") or SENTENCE)
    written = str(config.get("module_output_name") or read)

    def apply(features: Features) -> None:
        features[written] = function(features[read])

    return apply


_STEPS: Mapping[str, Callable[[Config, Mapping[str, Tensor]], Step]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": lambda config, weights: _mapped(config, partial(functional.normalize, dim=-1)),
    "Dropout": lambda config, weights: _mapped(config, lambda vectors: vectors),
    # The model gives the logits of the scored tokens only: see encoder_loading.py.
    "LogitScore": lambda config, weights: partial(_pool, ways=[_difference], read=CAUSAL, written=SCORES),
}
