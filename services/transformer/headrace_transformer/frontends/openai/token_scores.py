"""The log probabilities of tokens as OpenAI and vLLM write them.

`token` is the token's text, or `bytes:\\xe2\\x9c` where it is no whole character. A log probability of minus infinity,
which JSON lacks, is written as -9999. Source: OpenAI's API reference, and vLLM's OpenAI-compatible server.
"""

from collections.abc import Iterable
from typing import Any

from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.text.token_bytes import TokenBytes

_LOWEST = -9999.0


def token_scores(chunk: TextChunk, as_ids: bool = False) -> list[dict[str, Any]]:
    """The log probabilities of a chunk's tokens, and of the likeliest ones there; `as_ids` as in `token_name`."""
    made, written = chunk.tokens, chunk.origin.model.tokenizer.token_bytes

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = written.of(token_id)
        return {"token": token_name(token_id, data, as_ids), "logprob": finite(logprob), "bytes": list(data)}

    tops = made.top_logprobs or [[] for _ in made.token_ids]
    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(*other) for other in top]}
        for token_id, logprob, top in zip(made.token_ids, made.logprobs, tops, strict=True)
    ]


def prompt_scores(chunk: TextChunk) -> list[dict[str, Any] | None] | None:
    """vLLM's scores of a prompt: for each of its tokens but the first, an object of token id to log probability.

    Each has the prompt's own token and the likeliest ones, best first; `rank` is 1 for the likeliest, null for an own
    token that is not among them. None for a chunk without them.
    """
    scores = chunk.tokens.prompt
    if scores is None:
        return None
    tokens = chunk.origin.model.tokenizer.token_bytes
    ids, tops = chunk.origin.prompt_ids[1:], zip(scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    places = zip(ids, scores.chosen.tolist(), tops, strict=True)
    return [None, *(_place(tokens, own, value, zip(*top, strict=True)) for own, value, top in places)]


def _place(tokens: TokenBytes, own: int, value: float, top: Iterable[tuple[int, float]]) -> dict[str, Any]:
    ranked: dict[int, tuple[float, int | None]] = {own: (value, None)}
    ranked |= {token_id: (value, rank) for rank, (token_id, value) in enumerate(top, start=1)}
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": tokens.of(token_id).decode(errors="replace"),
        }
        for token_id, (value, rank) in ranked.items()
    }


def token_name(token_id: int, data: bytes, as_id: bool) -> str:
    """A token's text, or vLLM's way of naming it by its id."""
    if as_id:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
