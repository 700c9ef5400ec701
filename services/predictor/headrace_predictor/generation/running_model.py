"""A generation model whose engine runs in this process."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.generation.loaded_model import LoadedModel


@dataclass(frozen=True)
class LoadedGeneration(LoadedModel):
    """See the module."""

    engine: ContinuousBatchingEngine
