"""vLLM's `/classify`, `/score` and `/rerank`, the last as Cohere's and Jina's clients call it.

A classifier's probabilities are those that its files define (millrace/oip/row_outputs.py). The score of two texts is
that of a cross-encoder, which is a classifier of pairs with one label, or the cosine of the vectors of an embedding
model. Source of the shapes: vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from millrace.errors import InvalidRequestError
from millrace.oip.row_outputs import EMBEDDING, LOGITS, Vector
from millrace.rpc.call_context import CallContext
from services.transformer.frontends.openai.text_requests import ClassifyRequest, RerankRequest, ScoreRequest
from services.transformer.inference.encoder_calls import EncoderCalls, Request, Row, row_of, row_of_pair, rows_of_inputs
from services.transformer.models.models import RowModel

_TINY = np.finfo(np.float32).tiny


async def classify(request: ClassifyRequest, encoders: EncoderCalls, call: CallContext) -> dict[str, Any]:
    """The class of each input, with the probabilities of all."""
    rows_of = partial(rows_of_inputs, request.input)
    asked = Request(request.model, request.input, "classes", [LOGITS], rows_of, request.ignored_fields())
    model, vectors, tokens = await encoders.encode(asked, call)
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

    async def rows_of(model: RowModel) -> list[Row]:
        if model.output == EMBEDDING:
            rows = [await row_of(text, model, names[0], names[0]) for text in distinct]
            return rows + [await row_of(text, model, f"{names[1]} {i}", names[1]) for i, text in enumerate(seconds)]
        if len(model.labels) > 1:
            raise InvalidRequestError(
                f"model {request.model!r} has {len(model.labels)} labels; a score needs a model of one", param="model"
            )
        pairs = zip(firsts, seconds, strict=True)
        return [await row_of_pair(*pair, model, f"{names[1]} {i}", names[1]) for i, pair in enumerate(pairs)]

    texts = [*distinct, *seconds]
    asked = Request(request.model, texts, "scores", [EMBEDDING, LOGITS], rows_of, request.ignored_fields())
    model, vectors, tokens = await encoders.encode(asked, call)
    if model.output == EMBEDDING:
        of = dict(zip(distinct, vectors, strict=False))
        scores = [_cosine(of[first], vector) for first, vector in zip(firsts, vectors[len(distinct) :], strict=True)]
    else:
        scores = [float((model.activation(vector) if request.use_activation else vector)[0]) for vector in vectors]
    return scores, tokens


def _label(model: RowModel, logits: Vector) -> str:
    """The likeliest label; its number if the predictor does not name labels."""
    index = int(logits.argmax())
    return model.labels[index] if index < len(model.labels) else str(index)


def _cosine(first: Vector, second: Vector) -> float:
    return float(first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), _TINY))


def _listed(kind: str, model: str, call: CallContext) -> dict[str, Any]:
    return {"id": f"{kind}-{call.request_id}", "object": "list", "created": int(time.time()), "model": model}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
