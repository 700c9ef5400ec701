"""Loads a classification or embedding model; blocks for seconds; raises StartupError."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTextEncoding
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from millrace.errors import StartupError
from millrace.models.kinds import ModelKind
from millrace.oip.model_description import FINGERPRINT, INPUT_IDS, ModelDescription, TensorSpec
from millrace.oip.row_outputs import ACTIVATION, EMBEDDING, LABELS, LOGITS, TOKEN_TYPE_IDS, Activation
from services.predictor.models.fingerprint import fingerprint_of
from services.predictor.models.weights import dtype_name, load_weights
from services.predictor.settings import PredictorSettings
from services.predictor.tensor_models.encoder_model import BatchSettings, EncoderModel
from services.predictor.tensor_models.pooling import read_pooling
from services.predictor.tensor_models.row_network import RowNetwork
from services.predictor.tensor_models.rows import ATTENTION_MASK, RowLimits

logger = logging.getLogger(__name__)

_NAMED = 3
_ACTIVATIONS = {"Identity": Activation.IDENTITY, "Sigmoid": Activation.SIGMOID}  # torch.nn's.
_UNSTATED_LENGTH = 512  # For models without a position table, such as T5's, whose configuration names no length.


def load_encoder(
    name: str, folder: Path, is_local: bool, kind: ModelKind, settings: PredictorSettings, device: torch.device
) -> EncoderModel:
    """Returns the model with its thread running; may also raise transformers' errors for damaged files."""
    model, head, output = (_classifier if kind is ModelKind.CLASSIFICATION else _embedder)(
        name, folder, settings, device
    )
    pad_id = model.config.get_text_config().pad_token_id
    limits = RowLimits(
        model.get_input_embeddings().num_embeddings,
        _max_length(model, settings.max_context),
        settings.batch_rows,
        _token_types(model),
        pad_id or 0,
    )
    parameters = model.num_parameters()  # After packing, weights are no longer parameters.
    network = RowNetwork(model, head, limits.pad_id)
    network.prove(limits.vocabulary_size, limits.max_length)
    logger.info(
        "model %s: %s, %.1fM parameters, %s on %s, rows of %d, %s",
        *(name, type(model).__name__, parameters / 1e6, dtype_name(model), device.type, limits.max_length),
        "padded to batches" if network.pads_rows else "each run alone",
    )
    # Requests that will form the next batch do not count as waiting.
    max_waiting = settings.max_waiting + settings.batch_rows
    batches = BatchSettings(settings.batch_delay_ms / 1000, max_waiting, settings.step_timeout)
    description = _describe(name, model, device, kind, limits, output, network.pads_rows)
    fingerprint = fingerprint_of(folder, dtype_name(model), is_local)
    description = replace(description, parameters={**description.parameters, FINGERPRINT: fingerprint})
    return EncoderModel(name, network, limits, description, batches)


def _classifier(
    name: str, folder: Path, settings: PredictorSettings, device: torch.device
) -> tuple[Any, Any, TensorSpec]:
    model, missing = load_weights(name, folder, AutoModelForSequenceClassification, settings.dtype, device)
    _check_whole(name, missing)
    return model, _logits, TensorSpec(LOGITS, "FP32", [-1, model.config.num_labels])


def _embedder(
    name: str, folder: Path, settings: PredictorSettings, device: torch.device
) -> tuple[Any, Any, TensorSpec]:
    pooling = read_pooling(name, folder)
    config = AutoConfig.from_pretrained(pooling.folder, trust_remote_code=False)
    # Encoder-decoder models: only the encoder.
    auto = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    model, missing = load_weights(name, pooling.folder, auto, settings.dtype, device)
    # Some models have a pooling layer for classification; embeddings do not use it.
    _check_whole(name, [weight for weight in missing if not weight.startswith("pooler.")])

    def head(output: Any, mask: Tensor) -> Tensor:
        return pooling(output.last_hidden_state, mask)

    return model, head, TensorSpec(EMBEDDING, "FP32", [-1, model.config.get_text_config().hidden_size])


def _logits(output: Any, mask: Tensor) -> Tensor:
    logits: Tensor = output.logits
    return logits


def _check_whole(name: str, missing: Sequence[str]) -> None:
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise StartupError(
            f"model {name}: the folder lacks {', '.join(missing[:_NAMED])}{more}, without which its answers are random"
        )


def _max_length(model: Any, setting: int) -> int:
    """The maximum length of a row: that of the position table, or a lower setting."""
    stated: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for part, module in model.named_modules():
        if part.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            # RoBERTa's family numbers positions from the padding's index + 1.
            stated = module.num_embeddings - module.padding_idx - 1
    stated = stated or setting or _UNSTATED_LENGTH
    return min(setting or stated, stated)


def _token_types(model: Any) -> int:
    takes = TOKEN_TYPE_IDS in inspect.signature(model.forward).parameters
    return int(getattr(model.config, "type_vocab_size", 0) or 0) if takes else 0


def _activation_of(name: str, config: Any) -> Activation:
    """A classifier's activation: the one of a CrossEncoder of sentence-transformers, or the one of transformers'
    pipeline for text classification; raises StartupError for others."""
    stated = getattr(config, "sentence_transformers", None)
    function = stated.get("activation_fn") if isinstance(stated, dict) else None
    function = function or getattr(config, "sbert_ce_default_activation_function", None)
    if function:
        try:
            return _ACTIVATIONS[str(function).rpartition(".")[2]]
        except KeyError:
            raise StartupError(
                f"model {name}: its activation {function!r} is not one of {', '.join(_ACTIVATIONS)}"
            ) from None
    if config.problem_type == "regression":
        return Activation.IDENTITY
    is_each = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return Activation.SIGMOID if is_each else Activation.SOFTMAX


def _describe(
    name: str, model: Any, device: torch.device, kind: ModelKind, limits: RowLimits, output: TensorSpec, pads_rows: bool
) -> ModelDescription:
    names = [ATTENTION_MASK, *([TOKEN_TYPE_IDS] if limits.token_types else [])]
    parameters = {
        "architecture": type(model).__name__,
        "device": device.type,
        "dtype": dtype_name(model),
        "kind": str(kind),
        "context_length": str(limits.max_length),
        "vocabulary_size": str(limits.vocabulary_size),
        "max_batch": str(limits.max_rows),
        "pads_rows": str(pads_rows).lower(),
    }
    if kind is ModelKind.CLASSIFICATION:
        labels = model.config.id2label
        parameters[LABELS] = json.dumps([labels[i] for i in sorted(labels)], ensure_ascii=False)
        parameters[ACTIVATION] = _activation_of(name, model.config)
    return ModelDescription(
        platform="pytorch_transformers",
        inputs=[
            TensorSpec(INPUT_IDS, "INT64", [-1, -1]),
            *(TensorSpec(name, "INT64", [-1, -1], optional=True) for name in names),
        ],
        outputs=[output],
        max_batch_size=limits.max_rows,
        parameters=parameters,
    )
