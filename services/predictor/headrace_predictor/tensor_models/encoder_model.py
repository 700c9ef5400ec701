"""Serves a classification or embedding model on token ids (see rows.py), with dynamic batching.

One output: `logits` FP32 [B, labels] or `embedding` FP32 [B, size]; B is 1 for ids of one dimension. The event loop
validates requests, and a separate thread runs the batches.
"""

import numpy as np
import torch

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import HeadraceError, RequestFailedError, StartupError
from headrace.oip.model_description import INPUT_IDS, ModelDescription
from headrace.oip.stream_infer import FINAL
from headrace.oip.tensors import Tensor, add_output
from headrace_predictor.counts import RequestCounts
from headrace_predictor.models.served_model import ANY_CALLER, VERSION, Caller, Responses
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.tensor_models.batching import BatchWorker
from headrace_predictor.tensor_models.rows import ATTENTION_MASK, RowNetwork, Rows, Vectors, read_rows
from headrace_protos import inference_pb2 as pb


class EncoderModel:
    """A ServedModel; owns its thread."""

    def __init__(
        self, name: str, network: RowNetwork, description: ModelDescription, settings: PredictorSettings
    ) -> None:
        self.name = name
        self.description = description
        self._output = description.outputs[0].name
        self._limits = network.limits
        self._worker: BatchWorker[Rows, Vectors] = BatchWorker(
            name,
            network.run,
            max_rows=network.limits.max_rows,
            max_delay_s=settings.batch_delay_ms / 1000,
            # Requests that will form the next batch do not count as waiting.
            max_waiting=settings.max_waiting + settings.batch_rows,
            timeout_s=settings.step_timeout,
            # After a device error every later call fails too.
            fatal=(torch.AcceleratorError,),
        )

    @property
    def statistics(self) -> RequestCounts:
        return self._worker.counts

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        vectors = await self._run(read_rows(request, self._output, self._limits), caller.deadline)
        if not np.isfinite(vectors).all():
            raise RequestFailedError(f"the model's {self._output} of these ids has numbers that are not finite")
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        add_output(response, Tensor(self._output, "FP32", vectors))
        return response

    async def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        response = await self.infer(request, caller)
        response.parameters[FINAL].bool_param = True
        yield response

    def hand_back(self) -> None:
        """Does nothing: the model's answers cannot resume elsewhere."""

    async def warm_up(self) -> None:
        ids = np.full((1, 1), self._limits.end_id or 0, dtype=np.int64)
        try:
            await self._run({INPUT_IDS: ids, ATTENTION_MASK: np.ones_like(ids)}, NO_DEADLINE)
        except HeadraceError as error:
            raise StartupError(f"model {self.name} is not served: {error.message}") from None

    async def died(self) -> None:
        await self._worker.died()

    def close(self) -> None:
        self._worker.close()

    async def _run(self, rows: Rows, deadline: Deadline) -> Vectors:
        count, length = rows[INPUT_IDS].shape
        return await self._worker.submit(rows, count, length, deadline)
