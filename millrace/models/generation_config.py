"""What a model's files say about generation: `generation_config.json`, or else such fields of `config.json`.

Of the fields of transformers' GenerationConfig

- defaults of requests are `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, for
  encoder-decoder models `min_length`, and `min_new_tokens`, `max_new_tokens`, `max_length` (millrace/sampling.py);
- rules of every answer are those of `GenerationRules`, which act as in `generate`; `eos_token_id`,
  `decoder_start_token_id`;
- `IGNORED` would change an answer and do not: the load logs them, ModelConfig shows them;
- the others change no token here (caches, outputs, assistants, padding, `renormalize_logits`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.models.sources import read_config
from millrace.sampling import lengths_of

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
IGNORED_FIELDS = "generation_config_ignored"  # In ModelConfig.

# With the values that change nothing.
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "stop_strings": (),
    "max_time": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
_OF_BEAMS = ("length_penalty", "early_stopping")
_RULES = (
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
)
_DEFAULTS = (
    "do_sample temperature top_p top_k min_p repetition_penalty min_length min_new_tokens max_new_tokens max_length"
)
_FIELDS = frozenset((*IGNORED, *_OF_BEAMS, *_RULES, *_DEFAULTS.split(), "eos_token_id", "decoder_start_token_id"))


@dataclass(frozen=True)
class GenerationRules:
    """What holds for every answer of a model, see services/predictor/engine/sampling/rules.py.

    `biases`: sequences of ids, with what is added to the logit of the last after the others; `bad` ones have -inf.
    `decay`: from how many tokens on the end tokens gain, and by which factor. `min_length`: with the prompt.
    """

    eos_ids: tuple[int, ...] = ()
    forced_bos: int | None = None
    forced_eos: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    biases: tuple[tuple[tuple[int, ...], float], ...] = ()
    ngram: int = 0
    encoder_ngram: int = 0
    decay: tuple[int, float] | None = None
    min_length: int = 0


def read_generation(folder: Path) -> dict[str, Any]:
    """The fields that a folder states; raises ValueError, which names the file."""
    if own := read_config(folder, GENERATION_FILE):
        return own
    config = read_config(folder, "config.json")
    stated = {**(config.get("text_config") or {}), **config}
    return {name: value for name, value in stated.items() if name in _FIELDS and value is not None}


def eos_ids_of(generation: Mapping[str, Any], folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """The end tokens: those of the generation config or else the model's, and the tokenizer's own, as in vLLM."""
    stated = generation.get("eos_token_id")
    if stated is None:
        config = read_config(folder, "config.json")
        parts = (config, config.get("text_config") or {})
        stated = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
    own = () if tokenizer_eos is None else (tokenizer_eos,)
    return frozenset((*_ids("eos_token_id", stated), *own))


def rules_of(
    generation: Mapping[str, Any], eos_ids: frozenset[int], is_encoder_decoder: bool, vocabulary: int
) -> GenerationRules | None:
    """The rules of a model, None if it has none; raises ValueError for values that mean nothing."""

    def known(name: str, value: Any) -> tuple[int, ...]:
        return tuple(token_id for token_id in _ids(name, value) if 0 <= token_id < vocabulary)

    def several(name: str) -> tuple[tuple[int, ...], ...]:
        lists = (tuple(_ids(name, ids)) for ids in generation.get(name) or ())
        return tuple(ids for ids in lists if ids and max(ids) < vocabulary)

    try:
        biases = generation.get("sequence_bias") or ()
        decay = generation.get("exponential_decay_length_penalty")
        rules = GenerationRules(
            forced_bos=next(iter(known("forced_bos_token_id", generation.get("forced_bos_token_id"))), None),
            forced_eos=known("forced_eos_token_id", generation.get("forced_eos_token_id")),
            suppressed=known("suppress_tokens", generation.get("suppress_tokens")),
            begin_suppressed=known("begin_suppress_tokens", generation.get("begin_suppress_tokens")),
            bad=tuple(ids for ids in several("bad_words_ids") if not (len(ids) == 1 and ids[0] in eos_ids)),
            biases=tuple((tuple(_ids("sequence_bias", ids)), float(bias)) for ids, bias in biases),
            ngram=int(generation.get("no_repeat_ngram_size") or 0),
            encoder_ngram=int(generation.get("encoder_no_repeat_ngram_size") or 0),
            decay=None if decay is None else (int(decay[0]), float(decay[1])),
            min_length=0 if is_encoder_decoder else int(generation.get("min_length") or 0),
        )
    except (TypeError, IndexError) as error:
        raise ValueError(f"{GENERATION_FILE}: {error}") from None
    if rules == GenerationRules():
        return None
    return GenerationRules(**{**vars(rules), "eos_ids": tuple(sorted(eos_ids))})


def describe(name: str, generation: Mapping[str, Any], honours_rules: bool = True) -> dict[str, str]:
    """What ModelConfig shows of the fields; logs those that the server does not honour."""
    shown = {name: str(value) for name, value in lengths_of(generation).items()}
    if ignored := ignored_fields(generation, honours_rules):
        logger.warning("model %s: %s is not honoured: %s", name, GENERATION_FILE, ignored)
        shown[IGNORED_FIELDS] = ignored
    return shown


def ignored_fields(generation: Mapping[str, Any], honours_rules: bool = True) -> str:
    """The fields that would change an answer and do not, with their values; an engine may know no rules."""
    names = [name for name, neutral in IGNORED.items() if generation.get(name) not in (None, [], *neutral)]
    names += [name for name in _OF_BEAMS if "num_beams" in names and generation.get(name) is not None]
    if not honours_rules:
        names += [name for name in (*_RULES, "min_length") if generation.get(name) not in (None, [], 0)]
    return ", ".join(f"{name}={json.dumps(generation[name])}" for name in names)


def _ids(name: str, value: Any) -> Iterable[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"{GENERATION_FILE}: {name}={json.dumps(value)} is no token id and no list of them")
    return ids
