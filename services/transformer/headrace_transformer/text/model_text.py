"""The text side of a model, from its files: tokenizer, sampling defaults, context length."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, StartupError
from headrace.models.generation_config import GENERATION_FILE, eos_ids_of, read_generation
from headrace.models.hub import fetch
from headrace.models.kinds import ModelKind, kind_of
from headrace.models.sentence_files import SentenceFiles, read_sentence_files
from headrace.models.sources import ModelSource, read_config
from headrace.models.tokenizer_files import chat_templates, has_vocabulary
from headrace.sampling import CONTEXT_LENGTHS, ContextLimits, SamplingParameters, defaults_of
from headrace_transformer.text.tokenizer import FILES, TextTokenizer, row_tokenizer


@dataclass(frozen=True)
class ModelText:
    """See the module; a model that takes no text has no tokenizer. `limits` are None if no file has them.

    `rows` are the files of a model that makes vectors of rows.
    """

    tokenizer: TextTokenizer | None = None
    defaults: SamplingParameters = field(default_factory=SamplingParameters)
    limits: ContextLimits | None = None
    rows: SentenceFiles | None = None


@dataclass(frozen=True)
class AdapterBase:
    """The base of an adapter, with its text side if that has been read."""

    source: ModelSource
    text: ModelText | None = None


class BaseNeededError(Exception):
    """The files of an adapter need those of its base beside them."""


def read_text(source: ModelSource, pool: ThreadPoolExecutor, base: AdapterBase | None = None) -> ModelText:
    """Reads a model's files, which may first be downloaded; blocks; raises StartupError, and BaseNeededError.

    What the folder of an adapter lacks (tokenizer, chat template, sampling defaults) is that of its `base`.
    """
    folder = fetch(source, FILES)
    try:
        kind = kind_of(source, folder)
        if kind is ModelKind.ADAPTER:
            if base is None:
                raise BaseNeededError
            return _read_adapter(source, folder, base, pool)
        if kind is ModelKind.PYTHON:
            return ModelText()
        if kind is not ModelKind.GENERATION:
            files = read_sentence_files(folder)
            return ModelText(row_tokenizer(source.name, files, pool), rows=files)
        return _read_generation(TextTokenizer(source.name, folder, pool), folder, folder)
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OSError,
        HeadraceError,
    ) as error:  # Files may have any contents.
        raise StartupError(f"model {source.name}: {folder}: {error}") from None


def _read_adapter(source: ModelSource, folder: Path, base: AdapterBase, pool: ThreadPoolExecutor) -> ModelText:
    has_tokenizer, templates = has_vocabulary(folder), chat_templates(folder)
    has_defaults = (folder / GENERATION_FILE).is_file()
    if base.text is not None and not (has_tokenizer or templates or has_defaults):
        return base.text  # A tokenizer takes tens of megabytes.
    base_folder = fetch(base.source, FILES)
    tokenizer = TextTokenizer(source.name, folder if has_tokenizer else base_folder, pool)
    if not (has_tokenizer and templates):
        tokenizer.set_chat_templates(templates or chat_templates(base_folder))
    return _read_generation(tokenizer, base_folder, folder if has_defaults else base_folder)


def _read_generation(tokenizer: TextTokenizer, folder: Path, defaults_folder: Path) -> ModelText:
    config = read_config(folder, "config.json")
    is_encoder_decoder = bool(config.get("is_encoder_decoder"))
    generation = read_generation(defaults_folder)
    limits = _limits(config, is_encoder_decoder)
    limits = limits and limits.with_defaults(generation)
    tokenizer.decoder.set_end_ids(eos_ids_of(generation, folder, tokenizer.end_ids))
    return ModelText(tokenizer, defaults_of(generation, is_encoder_decoder), limits)


def _limits(config: dict[str, Any], is_encoder_decoder: bool) -> ContextLimits | None:
    lengths = [config[name] for name in CONTEXT_LENGTHS if isinstance(config.get(name), int)]
    return ContextLimits(lengths[0], is_encoder_decoder) if lengths else None
