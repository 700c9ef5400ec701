"""Loads a model of any kind: brings its files, decides its kind, and makes of it what the servicer serves.

`load` blocks: minutes for a download, seconds for the weights. What is wrong with a model is said
here in one line (StartupError), not by the first request.
"""

from __future__ import annotations

import logging

import torch

from millrace.errors import StartupError
from millrace.hub import Report, fetch
from millrace.model_kinds import ModelKind, kind_of
from millrace.model_sources import ModelSource
from services.predictor.generation_loading import load_generation
from services.predictor.generation_model import GenerationModel
from services.predictor.served_model import ServedModel
from services.predictor.settings import PredictorSettings
from services.predictor.tensor_models.encoder_loading import load_encoder
from services.predictor.tensor_models.python_model import PythonModel

logger = logging.getLogger(__name__)

_FILES = ("*.json", "*.safetensors")


def load(source: ModelSource, settings: PredictorSettings, device: torch.device, report: Report) -> ServedModel:
    """The model, running; tells `report` how far it is; raises StartupError."""
    try:
        return _load(source, settings, device, report)
    except StartupError:
        raise
    except Exception as error:
        # Damaged files fail in many libraries' own ways; none of them is cured by another try.
        logger.debug("model %s cannot be loaded", source.name, exc_info=True)
        raise StartupError(f"model {source.name} cannot be loaded: {_first_line(error)}") from None


def _load(source: ModelSource, settings: PredictorSettings, device: torch.device, report: Report) -> ServedModel:
    folder = fetch(source, _FILES, report)
    kind = kind_of(source, folder)
    if kind is ModelKind.PYTHON:
        report("loading model.py")
        return PythonModel(source.name, folder, settings.max_running, settings.max_waiting)
    report("loading the weights")
    if kind is ModelKind.GENERATION:
        return GenerationModel(load_generation(source.name, folder, settings, device))
    return load_encoder(source.name, folder, kind, settings, device)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
