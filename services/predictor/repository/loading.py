"""Loads a model of any kind: brings its files, decides its kind, and makes of it what the servicer serves.

In two steps, which block: `bring`, minutes for a download; `build`, seconds for the weights. What is
wrong with a model is said here in one line (StartupError), not by the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace.errors import StartupError
from millrace.models.hub import Report, fetch
from millrace.models.kinds import ModelKind, kind_of
from millrace.models.sources import ModelSource
from services.predictor.generation.loading import load_generation
from services.predictor.generation.model import GenerationModel
from services.predictor.models.served_model import ServedModel
from services.predictor.settings import PredictorSettings
from services.predictor.tensor_models.encoder_loading import load_encoder
from services.predictor.tensor_models.python_model import PythonModel

logger = logging.getLogger(__name__)

_FILES = ("*.json", "*.safetensors")


def load(source: ModelSource, settings: PredictorSettings, device: torch.device, report: Report) -> ServedModel:
    """The model, running; tells `report` how far it is; raises StartupError."""
    return build(source, fetch_model(source, report), settings, device, report)


@dataclass(frozen=True)
class FetchedModel:
    """A model's files on the local disk, and its kind."""

    folder: Path
    kind: ModelKind


def fetch_model(source: ModelSource, report: Report) -> FetchedModel:
    """Downloads what is not here yet; takes no memory worth mentioning; raises StartupError."""
    with _told_in_one_line(source.name):
        folder = fetch(source, _FILES, report)
        return FetchedModel(folder, kind_of(source, folder))


def build(
    source: ModelSource, fetched: FetchedModel, settings: PredictorSettings, device: torch.device, report: Report
) -> ServedModel:
    """The model, running; raises StartupError."""
    with _told_in_one_line(source.name):
        if fetched.kind is ModelKind.PYTHON:
            report("loading model.py")
            limits = (settings.max_running, settings.max_waiting, settings.python_timeout)
            return PythonModel(source.name, fetched.folder, *limits)
        report("loading the weights")
        if fetched.kind is ModelKind.GENERATION:
            return GenerationModel(load_generation(source.name, fetched.folder, source.is_local, settings, device))
        return load_encoder(source.name, fetched.folder, source.is_local, fetched.kind, settings, device)


@contextmanager
def _told_in_one_line(name: str) -> Iterator[None]:
    """Damaged files fail in many libraries' own ways; none of them is cured by another try."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        logger.debug("model %s cannot be loaded", name, exc_info=True)
        raise StartupError(f"model {name} cannot be loaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
