"""How kinds of engines take token ids and give them: bodies of requests, and events as tokens. Pure.

A format reads the events of one answer. `has_more`: events may follow the one that ends the answer. `body` is the
request that continues after `ids`, of which `produced` are the answer's; it raises InvalidRequestError for parameters
that the engine lacks. `take` adds to a chunk what an event has; it raises KeyError, TypeError, ValueError for what is
no such event.

Only what a request, or its model's generation config, states is sent: the rest is the engine's own default. Sources:
vLLM's OpenAI-compatible server (`return_token_ids`, `return_tokens_as_token_ids`), llama.cpp's server (`/completion`).
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import inf
from typing import Any

from headrace.errors import HopBrokenError, InvalidRequestError
from headrace.sampling import SamplingParameters
from headrace.structured_outputs import constraint_of
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.engines.engine import HOP
from headrace_transformer.text.token_bytes import TokenBytes

_SAME = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
# vLLM reads a grammar without this as one of llama.cpp, unless a line begins with `start:`.
_LARK = "%llguidance"
_REASONS = {"stop": "stop", "length": "length", "eos": "stop", "word": "stop", "limit": "length"}
_MAX_LOST = 8  # Tokens of one character: more than any has bytes.


class OpenAIFormat:
    """vLLM's completions with token ids; another Headrace has the same."""

    path, has_more = "/completions", True

    def __init__(self) -> None:
        self._top = 0
        self._has_ids = False

    def body(self, served: str, ids: Sequence[int], sampling: SamplingParameters, produced: int) -> dict[str, Any]:
        if sampling.bad_token_ids:
            raise InvalidRequestError("bad words are not supported by the model's engine", param="bad_words")
        given = _given(sampling, _SAME, "repetition_penalty", "stop_token_ids", "allowed_token_ids", "priority")
        body = given | {
            "model": served,
            "prompt": list(ids),
            "max_tokens": (sampling.max_tokens or 0) - produced,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            # The text is made here, of the ids.
            "skip_special_tokens": False,
        }
        if sampling.min_tokens > produced:
            body["min_tokens"] = sampling.min_tokens - produced
        if sampling.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
        if sampling.cache_salt:
            body["cache_salt"] = sampling.cache_salt
        self._top = sampling.top_logprobs
        if sampling.logprobs:
            body |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
        if sampling.structured_outputs:
            body["structured_outputs"] = _structured_outputs(sampling.structured_outputs)
        return body

    def take(self, event: Mapping[str, Any], chunk: TokenChunk) -> None:
        if usage := event.get("usage"):
            chunk.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or chunk.cached_tokens
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or []
            self._has_ids |= bool(ids)
            if choice.get("text") and not self._has_ids:
                raise HopBrokenError("the engine gives no token ids", hop=HOP)
            chunk.token_ids += map(_id, ids)
            scores = choice.get("logprobs")
            if scores and ids:
                chunk.logprobs += map(_number, scores["token_logprobs"][: len(ids)])
                if self._top:  # The token itself may be one more.
                    chunk.top_logprobs += [_ranked(top)[: self._top] for top in scores["top_logprobs"][: len(ids)]]
            if (reason := choice.get("finish_reason")) is not None:
                chunk.finish_reason = _reason(reason)


class LlamaFormat:
    """llama.cpp's own completions.

    Its stream leaves out the ids of tokens that end inside of a character, and sends the whole character with its last
    one: the others are found by their bytes. The id that ends an answer comes without text: it is kept back until it
    is known whether it did.
    """

    path, has_more = "/completion", False

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._produced = self._top = 0
        self._has_scores = False
        self._silent: list[int] = []
        self._stop_ids: frozenset[int] = frozenset()

    def body(self, served: str, ids: Sequence[int], sampling: SamplingParameters, produced: int) -> dict[str, Any]:
        for name in ("min_tokens", "bad_token_ids", "allowed_token_ids"):
            if getattr(sampling, name):
                raise InvalidRequestError("not supported by the model's engine, llama.cpp", param=name)
        self._stop_ids, self._top = frozenset(sampling.stop_token_ids), sampling.top_logprobs
        self._has_scores = sampling.logprobs
        body = _given(sampling, _SAME) | {
            "prompt": list(ids),
            "n_predict": (sampling.max_tokens or 0) - produced,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
        }
        if "repetition_penalty" in sampling.model_fields_set:
            body["repeat_penalty"] = sampling.repetition_penalty
        if sampling.logit_bias:
            body["logit_bias"] = [list(item) for item in sampling.logit_bias.items()]
        if sampling.logprobs:
            body["n_probs"] = max(1, sampling.top_logprobs)
        if sampling.structured_outputs:
            body |= _llama_form(sampling.structured_outputs)
        return body

    def take(self, event: Mapping[str, Any], chunk: TokenChunk) -> None:
        text, ids = event.get("content") or "", [_id(one) for one in event.get("tokens") or ()]
        if event.get("stop"):
            chunk.finish_reason = _reason(event["stop_type"])
            chunk.cached_tokens = (event.get("timings") or {}).get("cache_n")
            self._add(chunk, [], [])
            return
        count = int(event["tokens_predicted"])
        lost, self._produced = count - self._produced - len(ids), count
        if not text:
            self._silent += ids
            return
        if lost > 0:
            ids = [*self._lost_ids(text, ids, lost), *ids]
        self._add(chunk, ids, event.get("completion_probabilities") or ())
        if self._stop_ids.intersection(ids):
            chunk.finish_reason = "stop"

    def _add(self, chunk: TokenChunk, ids: Sequence[int], scores: Sequence[Mapping[str, Any]]) -> None:
        """Adds tokens, behind those kept back; of those that llama.cpp leaves out it has no log probabilities."""
        ids, self._silent = [*self._silent, *ids], []
        chunk.token_ids += ids
        if self._has_scores:
            lacking = len(ids) - len(scores)
            chunk.logprobs += [-inf] * lacking + [_number(score["logprob"]) for score in scores]
            if self._top:
                chunk.top_logprobs += [[] for _ in range(lacking)] + [_llama_top(one)[: self._top] for one in scores]

    def _lost_ids(self, text: str, ids: Sequence[int], lost: int) -> Sequence[int]:
        """The ids of the tokens before the last one of a text that begins with a character in several tokens."""
        data = text.encode().removesuffix(b"".join(map(self._vocabulary.of, ids)))
        if lost > _MAX_LOST or len(data) < lost:
            raise HopBrokenError("the engine leaves out tokens", hop=HOP)
        for cuts in combinations(range(1, len(data)), lost - 1):
            ends = [0, *cuts, len(data)]
            found = [self._vocabulary.id_of(data[start:end]) for start, end in pairwise(ends)]
            if None not in found:
                return [one for one in found if one is not None]
        raise HopBrokenError("the engine leaves out tokens", hop=HOP)


TokenFormat = OpenAIFormat | LlamaFormat


def _given(sampling: SamplingParameters, *names: str | Sequence[str]) -> dict[str, Any]:
    """The parameters that are stated, temperature and seed among them."""
    flat = [name for each in names for name in ((each,) if isinstance(each, str) else each)]
    if sampling.structured_outputs:
        flat.remove("ignore_eos")  # The end of the form is the answer's; vLLM's engine dies beyond it.
    given = {name: getattr(sampling, name) for name in flat if name in sampling.model_fields_set}
    if "temperature" in sampling.model_fields_set:
        given["temperature"] = 0.0 if sampling.is_greedy else sampling.temperature
    if sampling.seed is not None and not sampling.is_greedy:
        given["seed"] = sampling.seed % (1 << 31)
    return given


def _structured_outputs(text: str) -> dict[str, Any]:
    form = constraint_of(text)
    value = form.value
    if form.kind == "grammar" and _LARK not in value:
        value = f"{_LARK} {{}}\n{value}"
    compact = {"disable_any_whitespace": True} if form.disable_any_whitespace else {}
    return {form.kind: value} | compact


def _llama_form(text: str) -> dict[str, Any]:
    form = constraint_of(text)
    if form.kind in ("json", "json_object"):
        return {"json_schema": {"type": "object"} if form.kind == "json_object" else form.value}
    if form.kind == "choice":
        return {"grammar": "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in form.value)}
    raise InvalidRequestError(
        f"structured_outputs: llama.cpp, the model's engine, has no {form.kind}", param="structured_outputs"
    )


def _id(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no token id")
    return value


def _number(value: Any) -> float:
    return float("-inf") if value is None else float(value)


def _reason(value: Any) -> str:
    reason = _REASONS.get(value)
    if reason is None:
        raise HopBrokenError(f"the engine ended the answer: {str(value)[:64]}", hop=HOP)
    return reason


def _ranked(top: Mapping[str, Any]) -> list[tuple[int, float]]:
    found = [(int(token.removeprefix("token_id:")), _number(value)) for token, value in top.items()]
    return sorted(found, key=lambda item: -item[1])


def _llama_top(score: Mapping[str, Any]) -> list[tuple[int, float]]:
    return [(_id(one["id"]), _number(one["logprob"])) for one in score.get("top_logprobs") or ()]
