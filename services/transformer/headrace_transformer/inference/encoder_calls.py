"""Texts to vectors, by a predictor's `input_ids` → `embedding` or `logits`: embeddings, classes and scores.

Each row of token ids is a call of its own at the predictor, which batches calls and lets the gateway spread them
over replicas; all rows are tokenised and checked before the first call, and each waits for a predictor that is
away. A request leaves one record, with its texts and without the vectors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson

from headrace.errors import HopBrokenError, InvalidRequestError
from headrace.oip.model_description import INPUT_IDS, POOLING_MASK, TOKEN_TYPE_IDS, Vector
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace.payload.call import recorded
from headrace.payload.tap import PayloadTap
from headrace.rpc.server.call_context import CallContext
from headrace_protos import inference_pb2
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.generation.recording import MAX_RECORDED_CHARACTERS, recorded_list
from headrace_transformer.generation.token_quota import TokenQuota
from headrace_transformer.inference.rows import Row, RowReader, Text
from headrace_transformer.models.models import Model, RelayedModel, RowModel, TextModel
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.oip.oip_call import predictor_answers
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router

_CALLS_AT_ONCE = 32


class Request(NamedTuple):
    """`texts` are on record. `makes` names what is wanted, for errors; the model's output must be one of `outputs`.

    `cut` is that of RowReader.
    """

    model: str
    texts: Sequence[Text]
    makes: str
    outputs: Container[str]
    rows_of: Callable[[RowReader], Awaitable[Sequence[Row]]]
    ignored_fields: Sequence[str]
    cut: int | None = None


class Encoded(NamedTuple):
    """A vector for each row, and the number of their tokens."""

    model: RowModel
    vectors: list[Vector]
    tokens: int


@dataclass(frozen=True, eq=False)
class EncoderCalls:
    """Owned by the event loop; one for all requests."""

    router: Router
    predictor: PredictorClient
    tap: PayloadTap
    bodies: BodyProcesses
    quota: TokenQuota

    async def encode(self, request: Request, call: CallContext) -> Encoded:
        """The vectors of a request's rows; raises HeadraceError."""
        ignored = list(request.ignored_fields)
        parameters = orjson.dumps({"ignored_fields": ignored}).decode() if ignored else ""
        prompt = _recorded(request.texts)
        with recorded(self.tap, call, request.model, prompt=prompt, parameters=parameters) as recording:
            # One scope for all calls, which do not begin at once.
            async with call.deadline.scope():
                answering = await self.router.wait_for(request.model, "", call)
                encoded = await self._encode(request, answering.model, call)
            self.router.answered(answering)
            recording.served_model = answering.served
            recording.end("OK", usage=Usage(prompt_tokens=encoded.tokens))
            await recording.flushed()
            return encoded

    async def _encode(self, request: Request, found: Model, call: CallContext) -> Encoded:
        name, model = found.name, _row_model(request, found)
        rows = await request.rows_of(RowReader(model, self.bodies, request.cut))
        tokens = sum(len(row.ids) for row in rows)
        vectors: list[Vector] = [np.empty(0, np.float32)] * len(rows)
        waiting = iter(range(len(rows)))

        async def work() -> None:
            for index in waiting:
                vectors[index] = await self._vector(name, model.output, rows[index], call)

        try:
            with await self.quota.charged(call.client, tokens):
                async with asyncio.TaskGroup() as group:
                    for number in range(min(_CALLS_AT_ONCE, len(rows))):
                        group.create_task(work(), name=f"encode-{number}")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return Encoded(model, vectors, tokens)

    async def _vector(self, model: str, output: str, row: Row, call: CallContext) -> Vector:
        request = inference_pb2.ModelInferRequest(model_name=model, id=call.request_id)
        add_input(request, Tensor(INPUT_IDS, "INT64", np.array(row.ids, dtype=np.int64)))
        if row.type_ids is not None:
            add_input(request, Tensor(TOKEN_TYPE_IDS, "INT64", np.array(row.type_ids, dtype=np.int64)))
        if row.not_pooled:
            pooled = (np.arange(len(row.ids)) >= row.not_pooled).astype(np.int64)
            add_input(request, Tensor(POOLING_MASK, "INT64", pooled))
        answer = await self.predictor.infer(request.SerializeToString(), call.deadline)
        with predictor_answers():
            outputs = decode_outputs(inference_pb2.ModelInferResponse.FromString(answer))
        if output not in outputs:
            raise HopBrokenError(f"model {model!r} gave no {output}", hop="predictor")
        vector = outputs[output].array
        if vector.dtype.kind != "f" or not vector.size:
            raise HopBrokenError(f"model {model!r} gave an {output} that is no vector of floats", hop="predictor")
        if not np.isfinite(vector).all():  # Other servers may give such; JSON has no form of them.
            raise HopBrokenError(f"model {model!r} gave an {output} with numbers that are not finite", hop="predictor")
        return vector.reshape(-1).astype("<f4", copy=False)


def _row_model(request: Request, model: Model) -> RowModel:
    """How the model makes a vector of a text; raises InvalidRequestError."""
    name, makes = request.model, request.makes
    if isinstance(model, TextModel):
        raise InvalidRequestError(f"model {name!r} generates text and makes no {makes}", param="model")
    if not isinstance(model, RelayedModel) or model.rows is None or model.rows.output not in request.outputs:
        raise InvalidRequestError(
            f"model {name!r} makes no {makes} of text; call it by ModelInfer with its own tensors", param="model"
        )
    return model.rows


def _recorded(texts: Sequence[Text]) -> str:
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0][:MAX_RECORDED_CHARACTERS]
    return recorded_list(texts)
