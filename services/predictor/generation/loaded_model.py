"""A model that generates, as the loader hands it to the served model."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.sampling import SamplingParameters
from services.predictor.engine.interface import Engine


@dataclass(frozen=True)
class LoadedModel:
    """Its engine, and what the protocol describes."""

    name: str
    architecture: str
    device: str
    dtype: str
    defaults: SamplingParameters
    engine: Engine
    fingerprint: str = ""
