"""Embeddings, and vLLM's `/classify`, `/score` and `/rerank`, the last as Cohere's and Jina's clients call it.

In base64 a vector is of little-endian float32. A classifier's probabilities are those that its files define
(headrace/oip/model_description.py). The score of two texts is that of a cross-encoder, which is a classifier of pairs
with one label, or the cosine of the vectors of an embedding model, or what its files say instead of the cosine.
Source of the shapes: OpenAI's API reference, and vLLM's OpenAI-compatible server.
"""

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headrace.errors import InvalidRequestError
from headrace.models.sentence_files import SentenceFiles
from headrace.oip.model_description import EMBEDDING, LOGITS, Vector
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.text_requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)
from headrace_transformer.inference.encoder_calls import EncoderCalls, Request
from headrace_transformer.inference.rows import Row, RowReader
from headrace_transformer.models.models import RowModel

_TINY = np.finfo(np.float32).tiny
_ROWS_A_PIECE = 64  # Of the answer's JSON, so that writing it does not hold the event loop.


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


async def embed(request: EmbeddingsRequest, encoders: EncoderCalls, call: CallContext) -> Iterator[bytes]:
    """The JSON of its inputs' vectors, in pieces."""

    async def rows_of(reader: RowReader) -> list[Row]:
        prompt = reader.prompt(request.prompt_name, request.input_type)
        is_ids = any(not isinstance(text, str) for text in request.input)
        if is_ids and (name := request.prompt_name or request.input_type):
            raise InvalidRequestError(f"prompt {name[:64]!r} goes before texts, and the input is token ids")
        return [await reader.row(text, f"input {i}", "input", prompt) for i, text in enumerate(request.input)]

    cut = request.truncate_prompt_tokens
    wanted = Request(request.model, request.input, "embeddings", [EMBEDDING], rows_of, request.ignored_fields(), cut)
    model, vectors, tokens = await encoders.encode(wanted, call)
    if request.dimensions is not None:
        vectors = [_shortened(vector, request.dimensions, model.files) for vector in vectors]
    return embeddings_json(request, vectors, tokens)


def _shortened(vector: Vector, dimensions: int, files: SentenceFiles) -> Vector:
    """A vector's first numbers, of a model whose files say that they suffice; of length one if the whole one is."""
    allowed = files.dimensions
    if dimensions == len(vector):
        return vector
    if allowed is None:
        raise InvalidRequestError(
            "the model's files do not say that its vectors can be shortened: its config.json needs is_matryoshka or "
            f"matryoshka_dimensions; without dimensions they have {len(vector)}",
            param="dimensions",
        )
    if dimensions > len(vector) or (allowed and dimensions not in allowed):
        choices = ", ".join(map(str, allowed)) or f"1 to {len(vector)}"
        raise InvalidRequestError(f"dimensions {dimensions} is not one of the model's: {choices}", param="dimensions")
    first = vector[:dimensions]
    return first / max(np.linalg.norm(first), _TINY) if files.normalizes else first


def embeddings_json(request: EmbeddingsRequest, vectors: Sequence[Vector], tokens: int) -> Iterator[bytes]:
    """The answer's JSON, in pieces."""
    as_base64 = request.encoding_format == "base64"
    yield b'{"object":"list","data":['
    for first in range(0, len(vectors), _ROWS_A_PIECE):
        rows = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector}
            for index, vector in enumerate(vectors[first : first + _ROWS_A_PIECE], first)
        ]
        piece = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield piece if first == 0 else b"," + piece
    yield b'],"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(_usage(tokens)) + b"}"


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()
