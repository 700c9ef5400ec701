"""The inputs and the JSON of embeddings; base64 is of the vector's little-endian float32.

Source of the shapes: OpenAI's API reference.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from headrace.errors import InvalidRequestError
from headrace.models.sentence_files import SentenceFiles
from headrace.oip.row_outputs import EMBEDDING, Vector
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.text_requests import EmbeddingsRequest
from headrace_transformer.inference.encoder_calls import EncoderCalls, Request
from headrace_transformer.inference.rows import Row, RowReader

_TINY = np.finfo(np.float32).tiny
_ROWS_A_PIECE = 64  # Of the answer's JSON, so that writing it does not hold the event loop.


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
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield b'],"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(usage) + b"}"


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()
