"""vLLM's `prompt_logprobs` in answers: for each token of the prompt, an object of token id to log probability.

The first token has none. Each object has the prompt's own token and the likeliest ones, best first; `rank` is 1 for the
likeliest, null for an own token that is not among them. Source of the shape: vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

from typing import Any

from headrace_transformer.generation.chunks import ScoredPrompt
from headrace_transformer.text.token_bytes import TokenBytes

LOWEST = -9999.0  # JSON has no minus infinity.


def prompt_logprobs(prompt: ScoredPrompt, tokens: TokenBytes) -> list[dict[str, Any] | None]:
    scores = prompt.logprobs
    places = zip(prompt.ids[1:], scores.chosen.tolist(), scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    return [None, *(_place(tokens, *place) for place in places)]


def _place(tokens: TokenBytes, own: int, value: float, ids: list[int], values: list[float]) -> dict[str, Any]:
    ranked: dict[int, tuple[float, int | None]] = {own: (value, None)}
    ranked |= {token_id: (value, rank) for rank, (token_id, value) in enumerate(zip(ids, values, strict=True), start=1)}
    return {
        str(token_id): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": tokens.of(token_id).decode(errors="replace"),
        }
        for token_id, (value, rank) in ranked.items()
    }
