"""The inputs and the JSON of embeddings; base64 is of the vector's little-endian float32.

Source of the shapes: OpenAI's API reference.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial

import orjson

from millrace.oip.row_outputs import EMBEDDING, Vector
from services.transformer.frontends.openai.text_requests import EmbeddingsRequest
from services.transformer.inference.encoder_calls import Request, rows_of_inputs

_ROWS_A_PIECE = 64  # Of the answer's JSON, so that writing it does not hold the event loop.


def encoding_of(request: EmbeddingsRequest) -> Request:
    """The request for its inputs' vectors."""
    rows_of = partial(rows_of_inputs, request.input)
    return Request(request.model, request.input, "embeddings", [EMBEDDING], rows_of, request.ignored_fields())


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
