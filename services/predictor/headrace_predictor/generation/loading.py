"""Loads a generation model and builds its engine.

Blocks for seconds. Problems with the model or its memory are found here and not by the first request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from headrace.errors import StartupError
from headrace.models.generation_config import describe, eos_ids_of, read_generation, rules_of
from headrace.models.tokenizer_files import own_eos_id
from headrace.sampling import defaults_of
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.generation.loaded_model import LoadedGeneration
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.models.weights import dtype_name, load_weights, prepare_torch
from headrace_predictor.settings import PredictorSettings
from headrace_protos import engine_pb2

logger = logging.getLogger(__name__)

_MAPPINGS: dict[Any, Any] = {
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def load_own(launch: engine_pb2.EngineLaunch, flush: Callable[[], None]) -> LoadedGeneration:
    """Loads a model with the engine of this package: a Loader, see engine_process/worker.py."""
    settings = PredictorSettings(**json.loads(launch.settings))
    device = prepare_torch(settings)
    if launch.device_memory_elsewhere and device.type == "cuda":
        elsewhere = launch.device_memory_elsewhere / torch.cuda.mem_get_info(device)[1]
        settings = settings.model_copy(update={"gpu_memory_share": max(0.0, settings.gpu_memory_share - elsewhere)})
    return load_generation(launch.model, Path(launch.folder), launch.is_local, settings, device, flush)


def load_generation(
    name: str,
    folder: Path,
    is_local: bool,
    settings: PredictorSettings,
    device: torch.device,
    flush: Callable[[], None] = lambda: None,
) -> LoadedGeneration:
    """Returns the model with its engine running; raises StartupError, or transformers' own errors for damaged files.

    `is_local`: the folder is the user's own, not a snapshot of the hub. For `flush` see engine/engine.py.
    """
    model = load_weights(name, folder, _auto_class(name, folder), settings.dtype, device)
    fingerprint = fingerprint_of(folder, dtype_name(model), is_local)
    parameters = model.num_parameters()  # After packing, weights are no longer parameters.
    generation = read_generation(folder)
    eos_ids = eos_ids_of(generation, folder, own_eos_id(folder))
    engine = build_engine(name, model, settings, flush, GrammarCompiler(folder), eos_ids)
    engine.limits = engine.limits.with_defaults(generation)
    engine.rules = rules_of(generation, engine.limits.is_encoder_decoder, engine.limits.vocabulary_size)
    engine.description |= describe(name, generation)
    loaded = LoadedGeneration(
        name,
        type(model).__name__,
        device.type,
        dtype_name(model),
        defaults_of(generation, engine.limits.is_encoder_decoder),
        engine,
        fingerprint,
    )
    logger.info(
        "model %s: %s, %.1fM parameters, %s on %s, context %d",
        *(loaded.name, loaded.architecture, parameters / 1e6, loaded.dtype, loaded.device),
        engine.limits.context_length,
    )
    return loaded


def _auto_class(name: str, folder: Path) -> Any:
    """The Auto class that loads a folder's own class, of a model of images or sound the part that takes text."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    own = str((config.architectures or [""])[0])
    classes = {auto: found for auto, mapping in _MAPPINGS.items() if (found := mapping.get(type(config), None))}
    fitting = [auto for auto, found in classes.items() if found.__name__ == own]
    if (config.is_encoder_decoder and own.endswith("Model")) or not hasattr(transformers, own):
        fitting = fitting or [*classes]  # A class without its tied head, or the name of another library.
    if not fitting:
        raise StartupError(f"model {name}: {own or config.model_type} is not an architecture that generates text")
    if (reads := classes[fitting[0]].main_input_name) != "input_ids":
        raise StartupError(f"model {name}: {own} reads {reads}, not text")
    return (
        AutoModelForCausalLM
        if fitting == [AutoModelForMultimodalLM] and AutoModelForCausalLM in classes
        else fitting[0]
    )
