"""Loads a model of transformers and builds the engine that serves it.

`load` blocks: minutes for a download, seconds for the weights. Everything that can be wrong with a
model and its memory is found here and said in one line (StartupError), not by the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.utils.logging import disable_progress_bar

from millrace.errors import StartupError
from millrace.hub import Report, fetch
from millrace.model_sources import ModelSource, read_config
from millrace.sampling import SamplingParameters, defaults_of
from services.predictor.engine.interface import Engine, EngineLimits
from services.predictor.engine.row_engine import RowEngine
from services.predictor.engine.runner import CausalRunner, EncoderDecoderRunner, ModelRunner
from services.predictor.engine.scheduler import Scheduler
from services.predictor.settings import PredictorSettings

logger = logging.getLogger(__name__)

_FILES = ("*.json", "*.safetensors")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_UNSTATED_CONTEXT = 512  # For models with no position table, such as T5's, that name no length.
_LEAST_CONTEXT = 256


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be served: its engine and what is told of it."""

    name: str
    architecture: str
    device: str
    dtype: str
    defaults: SamplingParameters
    engine: Engine


def choose_device(wanted: str) -> torch.device:
    """The device that `PREDICTOR_DEVICE` means on this machine."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise StartupError("DEVICE=cuda, but torch finds no CUDA device; install its CUDA build or set DEVICE=cpu")
    return torch.device("cuda" if wanted != "cpu" and available else "cpu")


def load(source: ModelSource, settings: PredictorSettings, device: torch.device, report: Report) -> LoadedModel:
    """The model with its engine running; tells `report` how far it is; raises StartupError."""
    try:
        return _load(source, settings, device, report)
    except StartupError:
        raise
    except Exception as error:
        # Damaged files fail in many libraries' own ways; none of them is cured by another try.
        logger.debug("model %s cannot be loaded", source.name, exc_info=True)
        raise StartupError(f"model {source.name} cannot be loaded: {_first_line(error)}") from None


def _load(source: ModelSource, settings: PredictorSettings, device: torch.device, report: Report) -> LoadedModel:
    folder = fetch(source, _FILES, report)
    report("loading the weights")
    model = _load_weights(source.name, folder, settings.dtype, device)
    _check_devices(source.name, model, device)
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    context, cache_tokens = _plan_memory(source.name, model, settings)
    vocabulary = model.get_input_embeddings().num_embeddings
    runner: ModelRunner = EncoderDecoderRunner(model) if is_encoder_decoder else CausalRunner(model)
    engine = RowEngine(
        source.name,
        runner,
        Scheduler(settings.max_running, settings.max_waiting, cache_tokens),
        EngineLimits(context, is_encoder_decoder, vocabulary),
        _end_ids(model.generation_config.eos_token_id),
    )
    loaded = LoadedModel(
        source.name,
        type(model).__name__,
        device.type,
        str(model.dtype).removeprefix("torch."),
        defaults_of(read_config(folder, "generation_config.json"), is_encoder_decoder),
        engine,
    )
    logger.info(
        "model %s: %s, %.1fM parameters, %s on %s, context %d",
        *(loaded.name, loaded.architecture, model.num_parameters() / 1e6, loaded.dtype, loaded.device, context),
    )
    return loaded


def _load_weights(name: str, folder: Path, dtype: str, device: torch.device) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and config.is_encoder_decoder:
        auto: Any = AutoModelForSeq2SeqLM
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForCausalLM
    else:
        raise StartupError(f"model {name}: {config.model_type} is not an architecture that generates text")
    if not any(folder.glob("*.safetensors")):
        raise StartupError(f"model {name}: {folder} has no *.safetensors; other formats are not loaded")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Of the weights' reading, which takes seconds; a download's is shown.
    own = "auto" if device.type == "cuda" else torch.float32
    model = auto.from_pretrained(
        folder, dtype=_DTYPES.get(dtype, own), use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    return model.to(device).eval()


def _check_devices(name: str, model: Any, device: torch.device) -> None:
    """A part left on another device would fail the first request that reaches it, and only that."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for part, tensor in tensors:
            if tensor.device.type != device.type:
                raise StartupError(f"model {name}: {kind} {part} is on {tensor.device}, not on {device}")


def _plan_memory(name: str, model: Any, settings: PredictorSettings) -> tuple[int, int]:
    """The context length served, and the tokens whose keys and values fit the cache's memory."""
    config = model.config.get_text_config(decoder=True)
    per_token = _cache_bytes_per_token(config, model.dtype.itemsize)
    cache_tokens = settings.kv_cache_memory // per_token
    # An encoder-decoder model holds its prompt beside its output.
    fits = cache_tokens // 2 if model.config.is_encoder_decoder else cache_tokens
    stated = next((n for k in ("max_position_embeddings", "n_positions") if (n := getattr(config, k, None))), None)
    if stated is not None and settings.max_context > stated:
        raise StartupError(f"model {name}: PREDICTOR_MAX_CONTEXT={settings.max_context}, but its context is {stated}")
    own = stated or _UNSTATED_CONTEXT
    needed = settings.max_context or min(own, _LEAST_CONTEXT)
    if fits < needed:
        raise StartupError(
            f"model {name}: context {needed} needs {needed * per_token * (cache_tokens // max(fits, 1)) / 1e9:.2g} GB, "
            f"have {settings.kv_cache_memory / 1e9:.2g}; raise PREDICTOR_KV_CACHE_MEMORY or lower PREDICTOR_MAX_CONTEXT"
        )
    context = settings.max_context or min(own, fits)
    if context < own:
        logger.warning("model %s: context %d of its %d; PREDICTOR_KV_CACHE_MEMORY sets more", name, context, own)
    return context, cache_tokens


def _cache_bytes_per_token(config: Any, item_bytes: int) -> int:
    """Bytes of keys and values that one token takes in all layers."""

    def first(*names: str) -> int | None:
        return next((value for n in names if (value := getattr(config, n, None)) is not None), None)

    layers = first("num_decoder_layers", "decoder_layers", "num_hidden_layers") or 1
    heads = first("num_attention_heads", "num_heads") or 1
    kv_heads = first("num_key_value_heads") or heads
    head_size = first("head_dim", "d_kv") or config.hidden_size // heads
    return 2 * layers * kv_heads * head_size * item_bytes


def _end_ids(ids: int | Iterable[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
