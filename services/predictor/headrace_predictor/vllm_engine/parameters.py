"""Converts a sequence to a request of vLLM: a prompt of token ids and the arguments of vLLM's SamplingParams. Pure.

A sequence may have output already: it moved here from another replica, gave way to another one, or waited while one ran
isolated. vLLM's sampler keeps a random generator for each request and counts output ids for two penalties; both start
with the request. So such a sequence is either continued, its output as part of the prompt, which is exact where neither
matters; or it is repeated: generated from its beginning with the same seed, and the tokens that it already has are
compared and left out. So is an answer with a form: vLLM's grammar begins with the request too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.grammars import json_options
from headrace.sampling import SamplingParameters
from headrace.structured_outputs import constraint_of
from headrace_predictor.engine.state.sequence import Sequence

_SEEDS = 1 << 63  # vLLM takes -1 for none.
_LAST_RESORT = -1e9  # The bias of a token that is generated only if no other is allowed.
# vLLM reads a grammar without this as one of llama.cpp, unless a line begins with `start:`.
_LARK = "%llguidance"


@dataclass(frozen=True)
class VllmRequest:
    """`repeated`: the ids that vLLM generates again first."""

    prompt_ids: list[int]
    sampling: dict[str, Any]
    cache_salt: str | None
    repeated: tuple[int, ...] = ()


def vllm_request(sequence: Sequence, eos_ids: frozenset[int], end_id: int | None = None) -> VllmRequest:
    """The request that generates what follows the sequence's output; `eos_ids` are the model's own end tokens.

    `end_id` is the end token of vLLM's grammars, see constrained.py. Raises InvalidRequestError for parameters that
    vLLM lacks.
    """
    prompt, output, sampling = sequence.input_ids, sequence.output_ids, sequence.sampling
    salt = _cache_salt(sequence.client, sampling.cache_salt)
    if output and not _continues(sampling):
        return VllmRequest(prompt, _arguments(sequence, 0, eos_ids, end_id), salt, tuple(output))
    return VllmRequest([*prompt, *output], _arguments(sequence, len(output), eos_ids, end_id), salt)


def _continues(sampling: SamplingParameters) -> bool:
    """Whether the next token depends on the ids so far only, and not on which of them are output."""
    counts_output = sampling.presence_penalty or sampling.frequency_penalty or sampling.structured_outputs
    return sampling.is_greedy and not counts_output


def _arguments(sequence: Sequence, produced: int, eos_ids: frozenset[int], end_id: int | None) -> dict[str, Any]:
    sampling, form = sequence.sampling, sequence.sampling.structured_outputs
    ends, bias = sampling.end_ids(eos_ids), dict(sampling.logit_bias or {})
    if form and end_id is not None:
        if sampling.ignore_eos and end_id not in ends:
            bias[end_id] = _LAST_RESORT
        ends |= {end_id}
    if sampling.bad_token_ids:  # vLLM takes words only, and reads no tokenizer here.
        raise InvalidRequestError("bad words are not supported with vLLM as the engine", param="bad_words")
    return {
        "max_tokens": (sampling.max_tokens or 0) - produced,
        "min_tokens": max(0, sampling.min_tokens - produced),
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": None if sampling.is_greedy else (sampling.seed or 0) % _SEEDS,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # vLLM reads no tokenizer, and so knows no end token of the model.
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        "logit_bias": bias or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "logprobs": sampling.top_logprobs if sampling.logprobs else None,
        "prompt_logprobs": sequence.prompt_logprobs,
        "structured_outputs": _structured_outputs(form) if form else None,
        "detokenize": False,
    }


def _structured_outputs(text: str) -> dict[str, Any]:
    """The arguments of vLLM's StructuredOutputsParams for a form that the engine has compiled."""
    form = constraint_of(text)
    if form.kind in ("json", "json_object"):
        schema = {"type": "object"} if form.kind == "json_object" else form.value
        fields = schema if isinstance(schema, dict) else {}
        return {"json": json.dumps({**fields, "x-guidance": json_options(form)})}
    if form.kind == "grammar" and _LARK not in form.value:
        return {"grammar": f"{_LARK} {{}}\n{form.value}"}
    return {form.kind: form.value}


def _cache_salt(client: str, salt: str) -> str | None:
    """vLLM shares cached prefixes between requests of the same salt."""
    return f"{client}\n{salt}" if client or salt else None
