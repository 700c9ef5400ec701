"""vLLM's `/classify`, `/score` and `/rerank`, the last as Cohere's and Jina's clients call it.

A classifier's probabilities are those that its files define (headrace/oip/row_outputs.py). The score of two texts is
that of a cross-encoder, which is a classifier of pairs with one label, or the cosine of the vectors of an embedding
model, or what its files say instead of the cosine. Source of the shapes: vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import InvalidRequestError
from headrace.oip.row_outputs import EMBEDDING, LOGITS, Vector
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.text_requests import ClassifyRequest, RerankRequest, ScoreRequest
from headrace_transformer.inference.encoder_calls import EncoderCalls, Request
from headrace_transformer.inference.rows import Row, RowReader
from headrace_transformer.models.models import RowModel

_TINY = np.finfo(np.float32).tiny


async def classify(request: ClassifyRequest, encoders: EncoderCalls, call: CallContext) -> dict[str, Any]:
    """The class of each input, with the probabilities of all."""

    async def rows_of(reader: RowReader) -> list[Row]:
        prompt = reader.prompt(request.prompt_name) if request.prompt_name else ""
        inputs = enumerate(request.input)
        return [await reader.row(text, f"input {i}", "input", prompt, verbatim=True) for i, text in inputs]

    cut = request.truncate_prompt_tokens
    wanted = Request(request.model, request.input, "classes", [LOGITS], rows_of, request.ignored_fields(), cut)
    model, vectors, tokens = await encoders.encode(wanted, call)
    data = [
        {"index": index, "label": _label(model, vector), "probs": probabilities, "num_classes": len(probabilities)}
        for index, vector in enumerate(vectors)
        for probabilities in [(model.activation(vector) if request.use_activation else vector).tolist()]
    ]
    return _listed("classify", request.model, call) | {"data": data, "usage": _usage(tokens)}


async def score(request: ScoreRequest, encoders: EncoderCalls, call: CallContext) -> dict[str, Any]:
    """The score of each pair of texts."""
    firsts, seconds = request.text_1, request.text_2
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    scores, tokens = await _scores(request, firsts, seconds, ("text_1", "text_2"), encoders, call)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return _listed("score", request.model, call) | {"data": data, "usage": _usage(tokens)}


async def rerank(request: RerankRequest, encoders: EncoderCalls, call: CallContext) -> dict[str, Any]:
    """The documents that fit the query best, best first; equal ones in their own order."""
    queries = [request.query] * len(request.documents)
    scores, tokens = await _scores(request, queries, request.documents, ("query", "documents"), encoders, call)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if request.return_documents:
        for result in results:
            result["document"] = {"text": request.documents[result["index"]]}
    return {
        "id": f"rerank-{call.request_id}",
        "model": request.model,
        "results": results,
        "usage": _usage(tokens),
    }


async def _scores(
    request: ScoreRequest | RerankRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    names: tuple[str, str],
    encoders: EncoderCalls,
    call: CallContext,
) -> tuple[list[float], int]:
    """The score of each pair, and the number of tokens that the model has read."""
    distinct = list(dict.fromkeys(firsts))  # An embedding model reads a query once.

    async def rows_of(reader: RowReader) -> list[Row]:
        model, name = reader.model, request.prompt_name
        prompt = reader.prompt(name)
        if model.output == EMBEDDING:
            prompts = prompt, prompt
            if isinstance(request, RerankRequest) and name is None:
                prompts = reader.prompt(input_type="query"), reader.prompt(input_type="document")
            rows = [await reader.row(text, names[0], names[0], prompts[0]) for text in distinct]
            others = enumerate(seconds)
            return rows + [await reader.row(text, f"{names[1]} {i}", names[1], prompts[1]) for i, text in others]
        if len(model.labels) > 1:
            raise InvalidRequestError(
                f"model {request.model!r} has {len(model.labels)} labels; a score needs a model of one", param="model"
            )
        pairs = zip(firsts, seconds, strict=True)
        return [await reader.pair(*pair, f"{names[1]} {i}", names[1], prompt) for i, pair in enumerate(pairs)]

    texts = [*distinct, *seconds]
    ignored, cut = request.ignored_fields(), request.truncate_prompt_tokens
    wanted = Request(request.model, texts, "scores", [EMBEDDING, LOGITS], rows_of, ignored, cut)
    model, vectors, tokens = await encoders.encode(wanted, call)
    if model.output == EMBEDDING:
        of = dict(zip(distinct, vectors, strict=False))
        similar = _SIMILARITIES[model.files.config.get("similarity_fn_name") or "cosine"]
        pairs = zip(firsts, vectors[len(distinct) :], strict=True)
        scores = [float(similar(of[first].astype(float), vector.astype(float))) for first, vector in pairs]
    else:
        scores = [float((model.activation(vector) if request.use_activation else vector)[0]) for vector in vectors]
    return scores, tokens


def _label(model: RowModel, logits: Vector) -> str:
    """The likeliest label; its number if the predictor does not name labels."""
    index = int(logits.argmax())
    return model.labels[index] if index < len(model.labels) else str(index)


# sentence-transformers' similarity functions, of vectors in float64: squares of float32 overflow.
_SIMILARITIES: Mapping[str, Callable[[Any, Any], Any]] = {
    "cosine": lambda first, second: first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), _TINY),
    "dot": lambda first, second: first @ second,
    "euclidean": lambda first, second: -np.linalg.norm(first - second),
    "manhattan": lambda first, second: -np.abs(first - second).sum(),
}


def _listed(kind: str, model: str, call: CallContext) -> dict[str, Any]:
    return {"id": f"{kind}-{call.request_id}", "object": "list", "created": int(time.time()), "model": model}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
