"""Loads a classification or embedding model; blocks for seconds; raises StartupError."""

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from headrace.errors import StartupError
from headrace.models.kinds import ModelKind
from headrace.models.sentence_files import SentenceFiles, read_sentence_files
from headrace.models.sources import read_config
from headrace.oip.model_description import (
    ACTIVATION,
    EMBEDDING,
    FINGERPRINT,
    INPUT_IDS,
    LABELS,
    LOGITS,
    POOLING_MASK,
    TOKEN_TYPE_IDS,
    Activation,
    ModelDescription,
    TensorSpec,
)
from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.models.weights import load_weights
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.tensor_models.encoder_model import ATTENTION_MASK, Compute, EncoderModel, RowLimits, RowNetwork
from headrace_predictor.tensor_models.sentence_steps import (
    CAUSAL,
    MEAN_POOLING,
    SCORES,
    SENTENCE,
    TOKENS,
    Features,
    Step,
    step_of,
)

logger = logging.getLogger(__name__)

_ACTIVATIONS = {"Identity": Activation.IDENTITY, "Sigmoid": Activation.SIGMOID}  # torch.nn's.
_UNSTATED_LENGTH = 512  # For models without a position table, such as T5's, whose files name no length.
_UNBOUNDED_LENGTH = 128 * 1024  # Of models that only look tokens up.
# By the task of sentence-transformers' Transformer: the class, its output, and the feature that the output becomes.
_TASKS = {
    "feature-extraction": (AutoModel, "last_hidden_state", TOKENS),
    "sequence-classification": (AutoModelForSequenceClassification, "logits", SCORES),
    "text-generation": (AutoModelForCausalLM, "logits", CAUSAL),
}


class _Network(NamedTuple):
    """What computes vectors of rows; `config` is transformers', if it is one of its models."""

    compute: Compute
    limits: RowLimits
    architecture: str
    parameters: int
    dtype: torch.dtype
    config: Any = None
    scaling: Scaling | None = None


def load_encoder(
    name: str, folder: Path, is_local: bool, kind: ModelKind, settings: PredictorSettings, device: torch.device
) -> EncoderModel:
    """Returns the model with its thread running; may also raise any error for damaged files."""
    files = read_sentence_files(folder)
    load = _static_embedding if files.is_static else _transformer
    loaded = load(name, files, kind, settings, device)
    limits = loaded.limits
    network = RowNetwork(loaded.compute, limits, device, loaded.dtype, loaded.scaling)
    size = network.prove()
    dtype = str(loaded.dtype).removeprefix("torch.")
    logger.info(
        "model %s: %s, %.1fM parameters, %s on %s, rows of %d, %s",
        *(name, loaded.architecture, loaded.parameters / 1e6, dtype, device.type, limits.max_length),
        "padded to batches" if network.pads_rows else "each run alone",
    )
    parameters = {
        "architecture": loaded.architecture,
        "device": device.type,
        "dtype": dtype,
        "kind": str(kind),
        "context_length": str(limits.max_length),
        "vocabulary_size": str(limits.vocabulary_size),
        "max_batch": str(limits.max_rows),
        "pads_rows": str(network.pads_rows).lower(),
        FINGERPRINT: fingerprint_of(folder, dtype, is_local),
    }
    output = TensorSpec(EMBEDDING, "FP32", [-1, size])
    if kind is ModelKind.CLASSIFICATION:
        output = TensorSpec(LOGITS, "FP32", [-1, size])
        named = loaded.config.id2label
        labels = [named.get(i, f"LABEL_{i}") for i in range(size)]
        parameters[LABELS] = json.dumps(labels, ensure_ascii=False)
        parameters[ACTIVATION] = _activation_of(name, files, loaded.config, size)
    inputs = [TensorSpec(INPUT_IDS, "INT64", [-1, -1])]
    inputs += (TensorSpec(name, "INT64", [-1, -1], optional=True) for name in limits.optional_inputs)
    platform, rows = "pytorch_transformers", limits.max_rows
    description = ModelDescription(platform, inputs, [output], max_batch_size=rows, parameters=parameters)
    return EncoderModel(name, network, description, settings)


def _transformer(
    name: str, files: SentenceFiles, kind: ModelKind, settings: PredictorSettings, device: torch.device
) -> _Network:
    """A model of transformers, and the steps behind it."""
    classifies = kind is ModelKind.CLASSIFICATION
    task, result = files.task, SCORES if classifies else SENTENCE
    if files.modules:
        if files.modules[0].kind != "Transformer":
            raise ValueError(f"its module {files.modules[0].kind} is not served, only Transformer and StaticEmbedding")
        steps = [step_of(module, device) for module in files.modules[1:]]
    else:
        task, steps = ("sequence-classification", []) if classifies else (task, [MEAN_POOLING])
    if task not in _TASKS:
        raise ValueError(f"its task {task} is not served, only {', '.join(_TASKS)}")
    auto, attribute, feature = _TASKS[task]
    auto = _checked_class(files.inner, auto)
    # Some models have a pooling layer for classification; embeddings do not use it.
    optional = {"optional": "pooler."} if task == "feature-extraction" else {}
    model = load_weights(name, files.inner, auto, settings.dtype, device, **optional)
    takes = inspect.signature(model.forward).parameters
    if INPUT_IDS not in takes:
        raise ValueError(f"{type(model).__name__} reads no token ids")
    config = model.config.get_text_config()
    config.use_cache = False
    if feature == CAUSAL:
        _keep_scored_tokens(model, files)

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors[ATTENTION_MASK]
        features: Features = {ATTENTION_MASK: mask, POOLING_MASK: tensors.pop(POOLING_MASK, mask)}
        features[feature] = getattr(model(**tensors, return_dict=True), attribute).float()
        return _result(features, steps, result, files)

    poolings = [read_config(module.folder, "config.json") for module in files.modules if module.kind == "Pooling"]
    ends_text = classifies and model.config.is_encoder_decoder and not model.config.model_type.startswith("t5gemma")
    limits = RowLimits(
        model.get_input_embeddings().num_embeddings,
        _max_length(model, files, settings.max_context),
        settings.batch_rows,
        getattr(model.config, "type_vocab_size", 0) or 0 if TOKEN_TYPE_IDS in takes else 0,
        config.pad_token_id or 0,
        takes_pooling_mask=any(pooling.get("include_prompt") is False for pooling in poolings),
        end_id=config.eos_token_id if ends_text else None,
    )
    rotary = SequenceRotary.of(model, limits.max_length)
    scaling = None if rotary is None else rotary.scaling
    return _Network(compute, limits, type(model).__name__, model.num_parameters(), model.dtype, model.config, scaling)


def _static_embedding(
    name: str, files: SentenceFiles, kind: ModelKind, settings: PredictorSettings, device: torch.device
) -> _Network:
    """The mean of the tokens' rows in a table, as sentence-transformers' StaticEmbedding and model2vec compute it."""
    path = files.inner / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{files.inner} has no {path.name}; other formats are not loaded")
    weights = load_file(path)
    table = weights["embedding.weight" if "embedding.weight" in weights else "embeddings"].float()
    if "mapping" in weights:
        table = table[weights["mapping"].long()]
    if "weights" in weights:
        table *= weights["weights"].float()[:, None]
    table = table.to(device)
    steps = [step_of(module, device) for module in files.modules[1:]]

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        mask = tensors[ATTENTION_MASK].bool()
        counts = mask.sum(1)
        offsets = counts.cumsum(0) - counts
        vectors = functional.embedding_bag(tensors[INPUT_IDS][mask], table, offsets, mode="mean")
        return _result({SENTENCE: vectors}, steps, SENTENCE, files)

    length = min(files.max_length or _UNBOUNDED_LENGTH, settings.max_context or _UNBOUNDED_LENGTH)
    limits = RowLimits(len(table), length, settings.batch_rows, 0, 0)
    return _Network(compute, limits, "StaticEmbedding", table.numel(), table.dtype)


def _result(features: Features, steps: Sequence[Step], result: str, files: SentenceFiles) -> Tensor:
    try:
        for step in steps:
            step(features)
        return features[result][:, : files.config.get("truncate_dim")]
    except KeyError as missing:
        raise ValueError(f"its modules make no {missing.args[0]}") from None


def _checked_class(folder: Path, auto: Any) -> Any:
    """The class that loads a model, that of an encoder for the encoder of an encoder-decoder model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if (getattr(config, "auto_map", None) or {}).keys() & {auto.__name__}:
        raise ValueError(
            f"its config.json has code of its own (auto_map), which is never run; if transformers' {config.model_type} "
            "is the same model, remove auto_map"
        )
    if auto is AutoModel and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    if auto is AutoModel and config.is_encoder_decoder:
        raise ValueError(f"the encoder of {config.model_type} is not served by itself")
    return auto


def _keep_scored_tokens(model: Any, files: SentenceFiles) -> None:
    """Leaves of the output layer the tokens whose logits are the score, so that others are not computed."""
    found = [module for module in files.modules if module.kind == "LogitScore"]
    if not found:
        raise ValueError("a model that generates text makes a score only with the module LogitScore")
    stated = read_config(found[0].folder, "config.json")
    ids = [stated[name] for name in ("true_token_id", "false_token_id") if stated.get(name) is not None]
    whole = model.get_output_embeddings()
    kept = torch.nn.Linear(whole.in_features, len(ids), whole.bias is not None, whole.weight.device, whole.weight.dtype)
    kept.weight.data = whole.weight.data[ids].clone()
    if whole.bias is not None:
        kept.bias.data = whole.bias.data[ids].clone()
    model.set_output_embeddings(kept)


def _max_length(model: Any, files: SentenceFiles, setting: int) -> int:
    """The maximum length of a row: that of the position table, where sentence-transformers cuts, or a setting."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for part, module in model.named_modules():
        if part.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            # RoBERTa's family numbers positions from the padding's index + 1.
            positions = module.num_embeddings - module.padding_idx - 1
    lengths = [length for length in (positions, files.max_length, setting) if length and length > 0]
    return min(lengths, default=_UNSTATED_LENGTH)


def _activation_of(name: str, files: SentenceFiles, config: Any, labels: int) -> Activation:
    """A classifier's activation: the one of a CrossEncoder of sentence-transformers, or the one of transformers'
    pipeline for text classification; raises StartupError for others."""
    stated = getattr(config, "sentence_transformers", None)
    function = files.config.get("activation_fn") or (stated.get("activation_fn") if isinstance(stated, dict) else None)
    function = function or getattr(config, "sbert_ce_default_activation_function", None)
    if function:
        try:
            return _ACTIVATIONS[str(function).rpartition(".")[2]]
        except KeyError:
            raise StartupError(
                f"model {name}: its activation {function!r} is not one of {', '.join(_ACTIVATIONS)}"
            ) from None
    if files.is_cross_encoder:
        return Activation.SIGMOID if labels == 1 else Activation.IDENTITY
    if config.problem_type == "regression":
        return Activation.IDENTITY
    is_each = config.problem_type == "multi_label_classification" or labels == 1
    return Activation.SIGMOID if is_each else Activation.SOFTMAX
