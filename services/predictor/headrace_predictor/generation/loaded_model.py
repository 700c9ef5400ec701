"""A generation model as the loader returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import Engine

if TYPE_CHECKING:  # It imports torch, which the predictor's own process does without.
    from headrace_predictor.engine.engine import ContinuousBatchingEngine


@dataclass(frozen=True)
class LoadedModel:
    """A model's engine and the facts that its metadata and configuration report.

    `device_memory`: bytes that it holds on a GPU. `adapter`: its number in the engine, which is that of its base; 0 for
    a model that is no adapter.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    defaults: SamplingParameters
    engine: Engine
    fingerprint: str = ""
    device_memory: int = 0
    adapter: int = 0


@dataclass(frozen=True)
class LoadedGeneration(LoadedModel):
    """A generation model whose engine runs in this process."""

    engine: ContinuousBatchingEngine
