"""Embeddings: texts or token ids in, a vector each out, by a predictor's `input_ids` → `embedding`.

Each input is a call of its own at the predictor, which batches calls and lets the gateway spread them
over replicas; all inputs are tokenised and checked before the first call, and each waits for a predictor that is
away. A request leaves one record, with its inputs and without the vectors.
Source of the shapes: OpenAI's API reference; base64 is of the vector's little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from millrace.errors import HopBrokenError, InvalidRequestError
from millrace.oip.model_description import INPUT_IDS
from millrace.oip.tensors import Tensor, add_input, decode_outputs
from millrace.payload.call import recorded
from millrace.payload.tap import PayloadTap
from millrace.rpc.call_context import CallContext
from millrace_protos import inference_pb2
from millrace_protos.millrace_pb2 import Usage
from services.transformer.frontends.openai.requests import Prompt
from services.transformer.frontends.openai.text_requests import EmbeddingsRequest
from services.transformer.generation.recording import MAX_RECORDED_CHARACTERS, recorded_list
from services.transformer.models.models import RelayedModel, TextModel
from services.transformer.predictors.answers import predictor_answers
from services.transformer.predictors.predictor import Predictor
from services.transformer.routing.router import Router
from services.transformer.text.tokenizer import TextTokenizer, check_token_count

_CALLS_AT_ONCE = 32
_UNSTATED_LENGTH = 128 * 1024  # Tokens of an input where the predictor reports no limit: it refuses longer ones.
_ROWS_A_PIECE = 64  # Of the answer's JSON, so that writing it does not hold the event loop.

Vector = NDArray[np.float32]


class Embedder:
    """Owned by the event loop; one for all requests."""

    def __init__(self, router: Router, predictor: Predictor, tap: PayloadTap) -> None:
        self._router = router
        self._predictor = predictor
        self._tap = tap

    async def embed(self, request: EmbeddingsRequest, call: CallContext) -> tuple[list[Vector], int]:
        """The inputs' vectors, and how many tokens they had; raises MillraceError."""
        ignored = request.ignored_fields()
        parameters = orjson.dumps({"ignored_fields": ignored}).decode() if ignored else ""
        prompt = _recorded(request.input)
        with recorded(self._tap, call, request.model, prompt=prompt, parameters=parameters) as recording:
            # One scope for all calls, which do not begin at once.
            async with call.deadline.scope():
                vectors, tokens = await self._embed(request, call)
            recording.served_model = self._router.answering(request.model, call)
            recording.end("OK", usage=Usage(prompt_tokens=tokens))
            await recording.flushed()
            return vectors, tokens

    async def _embed(self, request: EmbeddingsRequest, call: CallContext) -> tuple[list[Vector], int]:
        model, tokenizer, context_length = await self._model(request.model, call)
        rows = [await _ids_of(item, i, tokenizer, context_length) for i, item in enumerate(request.input)]
        vectors: list[Vector] = [np.empty(0, np.float32)] * len(rows)
        waiting = iter(range(len(rows)))

        async def work() -> None:
            for index in waiting:
                vectors[index] = await self._vector(model, rows[index], call)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(_CALLS_AT_ONCE, len(rows))):
                    group.create_task(work(), name=f"embed-{number}")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return vectors, sum(map(len, rows))

    async def _model(self, name: str, call: CallContext) -> tuple[str, TextTokenizer, int]:
        """The model that answers, its tokenizer, and how many tokens an input may have."""
        model = await self._router.wait_for(name, "", call)
        if isinstance(model, TextModel):
            raise InvalidRequestError(f"model {name!r} generates text and makes no embeddings", param="model")
        if not isinstance(model, RelayedModel) or model.tokenizer is None:
            raise InvalidRequestError(
                f"model {name!r} makes no embeddings of text; call it by ModelInfer with its own tensors", param="model"
            )
        return model.name, model.tokenizer, model.context_length or _UNSTATED_LENGTH

    async def _vector(self, model: str, ids: list[int], call: CallContext) -> Vector:
        request = inference_pb2.ModelInferRequest(model_name=model, id=call.request_id)
        add_input(request, Tensor(INPUT_IDS, "INT64", np.array(ids, dtype=np.int64)))
        data = request.SerializeToString()
        answer = await self._predictor.backoff(call.deadline).retry(
            lambda: self._predictor.infer_bytes(data, call.deadline)
        )
        with predictor_answers():
            outputs = decode_outputs(inference_pb2.ModelInferResponse.FromString(answer))
        if "embedding" not in outputs:
            raise HopBrokenError(f"model {model!r} gave no embedding", hop="predictor")
        vector = outputs["embedding"].array
        if vector.dtype.kind != "f":
            raise HopBrokenError(f"model {model!r} gave an embedding that is no vector of floats", hop="predictor")
        return vector.reshape(-1).astype("<f4", copy=False)


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


async def _ids_of(item: Prompt, index: int, tokenizer: TextTokenizer, context_length: int) -> list[int]:
    """An input's token ids; others have their turn after each."""
    await asyncio.sleep(0)
    try:
        if isinstance(item, str):
            if not item:
                raise InvalidRequestError("the prompt is empty")
            return await tokenizer.encode(item, context_length)
        check_token_count(len(item), context_length)
        return item
    except InvalidRequestError as error:
        # The same words as for a prompt, and which of the inputs it is.
        raise type(error)(f"input {index}: {error.message}", param="input") from None


def _recorded(inputs: Sequence[Prompt]) -> str:
    if len(inputs) == 1 and isinstance(inputs[0], str):
        return inputs[0][:MAX_RECORDED_CHARACTERS]
    return recorded_list(inputs)
