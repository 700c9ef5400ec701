"""What a model's files say about generation: `generation_config.json`, or else such fields of `config.json`.

Of the fields of transformers' GenerationConfig

- `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, for encoder-decoder models `min_length`,
  and `min_new_tokens`, `max_new_tokens`, `max_length` are defaults of requests (headrace/sampling.py);
- those of `GenerationRules` hold for every answer, as in `generate`; so do `eos_token_id`, `decoder_start_token_id`;
- those of `_IGNORED` would change an answer and do not: the load logs them, ModelConfig shows them;
- the others change no token here (caches, outputs, assistants, padding, `renormalize_logits`).
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.models.sources import read_config
from headrace.sampling import LENGTHS, TokenId, end_ids_of

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
IGNORED_FIELDS = "generation_config_ignored"  # In ModelConfig.

# By the value that changes nothing.
_IGNORED: Mapping[float | None, tuple[str, ...]] = {
    1: (
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "typical_p",
        "guidance_scale",
        "encoder_repetition_penalty",
    ),
    0: ("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "token_healing"),
    None: ("top_h", "dola_layers", "constraints", "force_words_ids", "stop_strings", "max_time", "watermarking_config"),
}
_OF_BEAMS = ("length_penalty", "early_stopping")
# What else of a config.json counts where there is no generation_config.json.
_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens")
_OTHERS = (*LENGTHS, "eos_token_id", "decoder_start_token_id")

TokenIds = Annotated[
    tuple[TokenId, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: [value] if isinstance(value, int) else value),
]


class GenerationRules(BaseModel):
    """What holds for every answer of a model, see services/predictor/headrace_predictor/engine/sampling/rules.py."""

    model_config = ConfigDict(frozen=True)

    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenIds = ()
    suppress_tokens: TokenIds = ()
    begin_suppress_tokens: TokenIds = ()
    bad_words_ids: tuple[TokenIds, ...] = ()
    sequence_bias: tuple[tuple[TokenIds, float], ...] = ()
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    exponential_decay_length_penalty: tuple[int, float] | None = None
    min_length: int = 0


_FIELDS = {*GenerationRules.model_fields, *_DEFAULTS, *_OTHERS, *_OF_BEAMS}.union(*_IGNORED.values())


def read_generation(folder: Path) -> dict[str, Any]:
    """The fields that a folder states; raises ValueError, which names the file."""
    if own := read_config(folder, GENERATION_FILE):
        return own
    config = read_config(folder, "config.json")
    stated = {**(config.get("text_config") or {}), **config}
    return {name: value for name, value in stated.items() if name in _FIELDS and value is not None}


def eos_ids_of(generation: Mapping[str, Any], folder: Path, own: frozenset[int]) -> frozenset[int]:
    """The end tokens: those of the generation config or else the model's, and the tokenizer's `own`, as in vLLM."""
    config = read_config(folder, "config.json")
    parts = (generation, config, config.get("text_config") or {})
    stated = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
    ids = end_ids_of(stated) | own
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"{folder}: eos_token_id={stated!r} is no token id and no list of them")
    return ids


def rules_of(generation: Mapping[str, Any], is_encoder_decoder: bool, vocabulary: int) -> GenerationRules | None:
    """The rules of a model, None if it has none; raises ValueError for values that mean nothing."""
    stated = {name: generation[name] for name in GenerationRules.model_fields if generation.get(name)}
    if is_encoder_decoder or generation.get("min_new_tokens") is not None:
        stated.pop("min_length", None)  # A default of requests, or without effect.
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if generation.get(name) == 0:
            stated[name] = 0
    try:
        rules = GenerationRules.model_validate(stated)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{GENERATION_FILE}: {first['loc'][0]}={first['input']!r}: {first['msg']}") from None
    if any(token_id >= vocabulary for token_id in (*rules.forced_eos_token_id, rules.forced_bos_token_id or 0)):
        raise ValueError(f"{GENERATION_FILE}: a forced token is outside of the vocabulary, which has {vocabulary}")
    return rules if stated else None


def describe(name: str, generation: Mapping[str, Any]) -> dict[str, str]:
    """What ModelConfig shows of the fields; logs those that would change an answer and do not."""
    shown = {field: str(generation[field]) for field in LENGTHS if generation.get(field)}
    names = [field for neutral, fields in _IGNORED.items() for field in fields if generation.get(field) != neutral]
    names += _OF_BEAMS if "num_beams" in names else ()
    if ignored := [
        f"{field}={json.dumps(generation[field])}" for field in names if generation.get(field) not in (None, [])
    ]:
        logger.warning("model %s: %s is not honoured: %s", name, GENERATION_FILE, ", ".join(ignored))
        shown[IGNORED_FIELDS] = ", ".join(ignored)
    return shown
