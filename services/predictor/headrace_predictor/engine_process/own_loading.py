"""Loads a model with the engine of this package, in an engine process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from headrace_predictor.generation.loaded_model import LoadedGeneration
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.models.weights import prepare_torch
from headrace_predictor.settings import PredictorSettings
from headrace_protos import engine_pb2


def load_own(launch: engine_pb2.EngineLaunch, flush: Callable[[], None]) -> LoadedGeneration:
    """A Loader, see worker.py."""
    settings = PredictorSettings(**json.loads(launch.settings))
    device = prepare_torch(settings)
    if launch.device_memory_elsewhere and device.type == "cuda":
        elsewhere = launch.device_memory_elsewhere / torch.cuda.mem_get_info(device)[1]
        settings = settings.model_copy(update={"gpu_memory_share": max(0.0, settings.gpu_memory_share - elsewhere)})
    return load_generation(launch.model, Path(launch.folder), launch.is_local, settings, device, flush)
