"""Loads a generation model and builds its engine.

Blocks for seconds. Problems with the model or its memory are found here and not by the first request.
"""

import json
import logging
from collections.abc import Callable
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from headrace.errors import StartupError
from headrace.models.generation_config import describe, eos_ids_of, read_generation, rules_of
from headrace.models.gguf import reader
from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import read_gguf
from headrace.models.sources import GGUF_SUFFIX
from headrace.models.tokenizer_files import own_end_ids
from headrace.models.weight_headers import weight_bytes
from headrace.sampling import defaults_of
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.runners import unread
from headrace_predictor.engine.runners.memory import memory_left
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.generation.loaded_model import LoadedModel
from headrace_predictor.models import gguf_weights, quantised_checkpoints
from headrace_predictor.models.fingerprint import contents_of, fingerprint_of
from headrace_predictor.models.gguf_weights import has_gguf
from headrace_predictor.models.weights import dtype_name, load_weights, multiplies_bfloat16, prepare_torch
from headrace_predictor.settings import PredictorSettings
from headrace_protos import engine_pb2

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.1  # Of the free memory, where other engines' caches may take as much: they may have it already.
_WEIGHTS = ("*.safetensors", f"*{GGUF_SUFFIX}")
_READERS = (gguf_weights, quantised_checkpoints, unread, reader)
_MAPPINGS: dict[Any, Any] = {
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def load_launched(launch: engine_pb2.EngineLaunch, flush: Callable[[], None]) -> LoadedModel[ContinuousBatchingEngine]:
    """Loads the model of an engine process and starts its engine; for the rest see `load_generation`."""
    settings = PredictorSettings(**json.loads(launch.settings))
    folder, elsewhere = Path(launch.folder), launch.device_memory_elsewhere
    device = prepare_torch(settings, weight_bytes(folder).total())
    if elsewhere and device.type == "cuda":
        share = settings.gpu_memory_share - elsewhere / torch.cuda.mem_get_info(device)[1]
        settings = settings.model_copy(update={"gpu_memory_share": max(0.0, share)})
    elif elsewhere:
        left = max(_LEAST_SHARE, 1 - elsewhere / max(1, memory_left() or 0))
        settings = settings.model_copy(update={"memory_share": settings.memory_share * left})
    return load_generation(launch.model, folder, launch.is_local, settings, device, flush)


def load_generation(
    name: str,
    folder: Path,
    is_local: bool,
    settings: PredictorSettings,
    device: torch.device,
    flush: Callable[[], None] = lambda: None,
) -> LoadedModel[ContinuousBatchingEngine]:
    """Returns the model with its engine running; raises StartupError, or transformers' own errors for damaged files.

    `is_local`: the folder is the user's own, not a snapshot of the hub. For `flush` see engine/engine.py.
    """
    auto = _auto_class(name, folder)
    loaded = None
    if settings.dtype == "auto" and device.type == "cpu" and auto is not AutoModelForSeq2SeqLM:
        sizes = weight_bytes(folder)
        quantised = sum(size for kind, size in sizes.items() if kind.startswith(("Q", "I", "F8")))
        wants = settings.weights != "auto"
        halves = sizes["BF16"] + quantised + (0 if wants else sizes["F16"])
        if 2 * halves > sizes.total() and (wants or quantised or multiplies_bfloat16()):
            loaded = _load(name, folder, is_local, auto, settings.model_copy(update={"dtype": "bf16"}), device, flush)
            facts = loaded.engine.description
            is_slow = facts["weights"] == "bfloat16" and not multiplies_bfloat16()
            if is_slow or facts["runner"] != PagedRunner.description:
                # Its products are not packed: slower than float32's, and others in another batch.
                loaded.engine.close()
                loaded = None
    loaded = loaded or _load(name, folder, is_local, auto, settings, device, flush)
    facts, context = loaded.engine.description, loaded.engine.limits.context_length
    dtype = loaded.dtype if settings.weights == "auto" else f"{facts['weights']} weights, {loaded.dtype} cache"
    logger.log(
        logging.INFO if context == (settings.max_context or int(facts["own_context_length"])) else logging.WARNING,
        "model %s: %s, %.1fM parameters, %s, %s on %s, %d threads, %s sequences at once, context %d of its %s, "
        "KV cache of %.2g GB; PREDICTOR_DTYPE, _WEIGHTS, _THREADS, _MAX_RUNNING, _MAX_CONTEXT, _KV_CACHE_MEMORY set it",
        *(name, loaded.architecture, int(facts["parameter_count"]) / 1e6, facts["runner"], dtype, loaded.device),
        *(torch.get_num_threads(), facts["max_running"], context, facts["own_context_length"]),
        int(facts["cache_bytes"]) / 1e9,
    )
    return loaded


def _load(
    name: str,
    folder: Path,
    is_local: bool,
    auto: Any,
    settings: PredictorSettings,
    device: torch.device,
    flush: Callable[[], None],
) -> LoadedModel[ContinuousBatchingEngine]:
    # Before they are read: files may be replaced meanwhile.
    contents = contents_of(folder, is_local)
    kept_at = Path(expanduser(settings.weights_cache)) / _digest(folder, contents)
    model = load_weights(name, folder, auto, settings.dtype, device)
    generation = read_generation(folder)
    eos_ids = eos_ids_of(generation, folder, own_end_ids(folder))
    engine = build_engine(name, model, settings, flush, GrammarCompiler(folder), eos_ids, kept_at)
    dtype, weights = dtype_name(model), engine.description["weights"]
    numbers = dtype if weights == dtype else f"{dtype} {weights}{engine.description['angles']}"
    fingerprint = fingerprint_of(folder, numbers, is_local, contents=contents)
    engine.limits = engine.limits.with_defaults(generation)
    engine.rules = rules_of(generation, engine.limits.is_encoder_decoder, engine.limits.vocabulary_size)
    engine.description |= describe(name, generation)
    defaults = defaults_of(generation, engine.limits.is_encoder_decoder)
    return LoadedModel(name, type(model).__name__, device.type, dtype_name(model), defaults, engine, fingerprint)


def _digest(folder: Path, contents: bytes) -> str:
    """A digest of the fingerprint, which leaves out parts of large tensors, of when the files were changed, and of the
    code that reads quantised ones."""
    paths = {path for pattern in _WEIGHTS for path in folder.rglob(pattern)}
    if has_gguf(folder):
        paths |= {place.path for place in read_gguf(folder / WEIGHTS_FILE).tensors.values()}
    changed = [path.stat().st_mtime_ns for path in sorted(paths)]
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in _READERS)
    return sha256(f"{fingerprint_of(folder, '', True, contents=contents)} {changed}".encode() + code).hexdigest()[:32]


def _auto_class(name: str, folder: Path) -> Any:
    """The Auto class that loads a folder's own class, of a model of images or sound the part that takes text."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    own = str((config.architectures or [""])[0])
    classes = {auto: found for auto, mapping in _MAPPINGS.items() if (found := mapping.get(type(config), None))}
    fitting = [auto for auto, found in classes.items() if found.__name__ == own]
    if not fitting and ((config.is_encoder_decoder and own.endswith("Model")) or not hasattr(transformers, own)):
        fitting = [*classes]  # A class without its tied head, or the name of another library.
    if not fitting:
        raise StartupError(f"model {name}: {own or config.model_type} is not an architecture that generates text")
    if (reads := classes[fitting[0]].main_input_name) != "input_ids":
        raise StartupError(f"model {name}: {own} reads {reads}, not text")
    return (
        AutoModelForCausalLM
        if fitting == [AutoModelForMultimodalLM] and AutoModelForCausalLM in classes
        else fitting[0]
    )
