"""Pools the vectors of a row's tokens to one vector.

The model's folder defines how: sentence-transformers' `modules.json` lists the steps. Supported steps: the transformer,
a pooling (cls, mean, max or last token) and normalisation to length one. A folder without it means the mean. Source:
the files that sentence-transformers writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millrace.errors import StartupError
from millrace.models.kinds import MODULES_FILE
from millrace.models.sources import read_config

_EPSILON = 1e-12


def _cls(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), mask.argmax(1)]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return states[torch.arange(len(states), device=states.device), (mask * positions).argmax(1)]


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)


_WAYS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _cls, "mean": _mean, "max": _max, "lasttoken": _last,
}  # fmt: skip
# The same poolings in the files of earlier versions.
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Pooling:
    """The steps after the transformer, whose own files are in `folder`."""

    folder: Path
    way: str = "mean"
    normalize: bool = False

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pools states [rows, tokens, hidden] where mask [rows, tokens] is 1; returns float32 [rows, hidden]."""
        vectors = _WAYS[self.way](states.float(), mask)
        return torch.nn.functional.normalize(vectors, dim=1, eps=_EPSILON) if self.normalize else vectors


def read_pooling(name: str, folder: Path) -> Pooling:
    """Reads the pooling from a model's folder; raises StartupError for unknown steps."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return Pooling(folder)
    transformer, way, normalize = folder, "mean", False
    for module in json.loads(path.read_text()):
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Transformer":
            transformer = folder / module["path"]
        elif kind == "Pooling":
            way = _way(name, read_config(folder / module["path"], "config.json"))
        elif kind == "Normalize":
            normalize = True
        else:
            raise StartupError(f"model {name}: {path} has a step {kind}, which is not served")
    return Pooling(transformer, way, normalize)


def _way(name: str, config: Mapping[str, object]) -> str:
    mode = config.get("pooling_mode")
    flagged = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    ways = [mode] if mode else [way for way, flag in _FLAGS.items() if flagged == [flag]]
    if len(ways) != 1 or ways[0] not in _WAYS:
        raise StartupError(f"model {name}: its pooling ({mode or ', '.join(flagged)}) is not one of {', '.join(_WAYS)}")
    return str(ways[0])
