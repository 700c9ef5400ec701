"""Loads a model of any kind: fetches its files, determines its kind, builds what the servicer serves.

In two steps, which both block: `fetch_model`, minutes for a download; `build`, seconds for the weights. Problems with a
model raise StartupError with one line of text here and do not wait for the first request.
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


@dataclass(frozen=True)
class FetchedModel:
    """A model's files on the local disk, and its kind."""

    folder: Path
    kind: ModelKind


def fetch_model(source: ModelSource, report: Report) -> FetchedModel:
    """Downloads missing files; needs no significant memory; raises StartupError."""
    with _raise_startup_error(source.name):
        folder = fetch(source, _FILES, report)
        return FetchedModel(folder, kind_of(source, folder))


def build(
    source: ModelSource, fetched: FetchedModel, settings: PredictorSettings, device: torch.device, report: Report
) -> ServedModel:
    """Returns the running model; raises StartupError."""
    with _raise_startup_error(source.name):
        if fetched.kind is ModelKind.PYTHON:
            report("loading model.py")
            limits = (settings.max_running, settings.max_waiting, settings.python_timeout)
            return PythonModel(source.name, fetched.folder, *limits)
        report("loading the weights")
        if fetched.kind is ModelKind.GENERATION:
            return GenerationModel(load_generation(source.name, fetched.folder, source.is_local, settings, device))
        return load_encoder(source.name, fetched.folder, source.is_local, fetched.kind, settings, device)


@contextmanager
def _raise_startup_error(name: str) -> Iterator[None]:
    """Converts any error to a StartupError: damaged files raise errors of many types, and a retry helps with none."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        logger.debug("model %s cannot be loaded", name, exc_info=True)
        raise StartupError(f"model {name} cannot be loaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
