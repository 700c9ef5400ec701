"""The text side of a model, from its files: tokenizer, sampling defaults, context length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import MillraceError, StartupError
from millrace.models.hub import fetch
from millrace.models.kinds import ModelKind, kind_of
from millrace.models.sources import ModelSource, read_config
from millrace.sampling import ContextLimits, SamplingParameters, defaults_of
from services.transformer.text.tokenizer import FILES, TextTokenizer, row_tokenizer

# The names that configurations of transformers have for it.
_CONTEXT_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True)
class ModelText:
    """See the module; a model that takes no text has no tokenizer. `limits` are None if no file has them."""

    tokenizer: TextTokenizer | None = None
    defaults: SamplingParameters = field(default_factory=SamplingParameters)
    limits: ContextLimits | None = None


def read_text(source: ModelSource, pool: ThreadPoolExecutor) -> ModelText:
    """Reads a model's files, which may first be downloaded; blocks; raises StartupError."""
    folder = fetch(source, FILES)
    try:
        kind = kind_of(source, folder)
        if kind is ModelKind.PYTHON:
            return ModelText()
        if kind is not ModelKind.GENERATION:
            return ModelText(row_tokenizer(source.name, folder, pool))
        config = read_config(folder, "config.json")
        is_encoder_decoder = bool(config.get("is_encoder_decoder"))
        defaults = defaults_of(read_config(folder, "generation_config.json"), is_encoder_decoder)
        return ModelText(TextTokenizer(source.name, folder, pool), defaults, _limits(config, is_encoder_decoder))
    except (ValueError, TypeError, AttributeError, OSError, MillraceError) as error:  # Files may have any contents.
        raise StartupError(f"model {source.name}: {folder}: {error}") from None


def _limits(config: dict[str, Any], is_encoder_decoder: bool) -> ContextLimits | None:
    lengths = [config[name] for name in _CONTEXT_LENGTH if isinstance(config.get(name), int)]
    return ContextLimits(lengths[0], is_encoder_decoder) if lengths else None
