"""Serves a classification or embedding model on rows of token ids, with dynamic batching.

One output: `logits` FP32 [B, labels] or `embedding` FP32 [B, size]; B is 1 for ids of one dimension. The event loop
validates requests, and a separate thread runs the batches.

Inputs of a request: `input_ids` INT64 or INT32, [N] or [B, N]; optional, of the same shape, `attention_mask` (0 or 1;
default 1) and, if the model takes them, `token_type_ids` (default 0) and `pooling_mask` (0 where a token is read and
not pooled; default: the attention mask). Invalid inputs raise InvalidRequestError. Padding is on the right, with mask
0.

`RowNetwork.run` blocks; only one thread calls it. Rows are padded to one batch if that does not change results: `prove`
compares short rows alone with the same rows padded. If they differ (the model uses padding as input, or has no padding
token), every row runs alone. So do rows of different stages, where positions are scaled by the longest one of a batch
(`Scaling`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import HeadraceError, InvalidRequestError, RequestFailedError, StartupError
from headrace.oip.model_description import INPUT_IDS, POOLING_MASK, TOKEN_TYPE_IDS, ModelDescription, check_names
from headrace.oip.stream_infer import FINAL
from headrace.oip.tensors import Tensor, add_output, checked_shape, decode_inputs
from headrace_predictor.engine.state.in_flight import Scaling
from headrace_predictor.models.served_model import ANY_CALLER, VERSION, Caller, Responses, ServedModel
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.tensor_models.batching import BatchWorker
from headrace_protos import inference_pb2 as pb

ATTENTION_MASK = "attention_mask"

Ids = NDArray[np.int64]
Rows = Mapping[str, Ids]  # Each input [rows, length]; input_ids and attention_mask are always present.

Vectors = NDArray[np.float32]
Compute = Callable[[dict[str, torch.Tensor]], torch.Tensor]  # From a batch's inputs to vectors [rows, size].

_LENGTHS = (2, 3, 6, 11)  # One row could come out right by chance.
# Rounding depends on the batch's shape; a real effect of padding is far larger.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


@dataclass(frozen=True)
class RowLimits:
    """A model's limits; `token_types` is 0 if it takes no token_type_ids. Each row needs the id `end_id`, if any.

    `pad_id` is the model's own padding id.
    """

    vocabulary_size: int
    max_length: int
    max_rows: int
    token_types: int
    pad_id: int
    takes_pooling_mask: bool = False
    end_id: int | None = None

    @property
    def optional_inputs(self) -> list[str]:
        """The names of the inputs beside the ids."""
        types = [TOKEN_TYPE_IDS] if self.token_types else []
        return [ATTENTION_MASK, *types, *([POOLING_MASK] if self.takes_pooling_mask else [])]


def read_rows(request: pb.ModelInferRequest, output: str, limits: RowLimits) -> Rows:
    """Reads a request's rows; `output` is the only output that it may name."""
    for tensor in request.inputs:  # Decoding an oversized tensor would take long.
        shape = checked_shape(tensor.name, tensor.shape)
        if math.prod(shape) > limits.max_rows * limits.max_length:
            _check_shape(tensor.name, shape, limits)
    tensors = decode_inputs(request)
    check_names("input", tensors, (INPUT_IDS, *limits.optional_inputs))
    check_names("output", (requested.name for requested in request.outputs), (output,))
    if INPUT_IDS not in tensors:
        raise InvalidRequestError(f"input {INPUT_IDS!r} is missing")
    shape = tensors[INPUT_IDS].array.shape
    _check_shape(INPUT_IDS, shape, limits)
    rows = {INPUT_IDS: _integers(tensors[INPUT_IDS], shape, limits.vocabulary_size)}
    if limits.end_id is not None and not (rows[INPUT_IDS] == limits.end_id).any(axis=1).all():
        raise InvalidRequestError(
            f"{INPUT_IDS}: a row lacks the id {limits.end_id}, by which the model reads a text's end"
        )
    rows[ATTENTION_MASK] = np.ones_like(rows[INPUT_IDS])
    for name in (ATTENTION_MASK, POOLING_MASK):
        if name in tensors:
            rows[name] = _integers(tensors[name], shape, 2)
            if not (rows[name] & rows[ATTENTION_MASK]).any(axis=1).all():
                raise InvalidRequestError(f"{name} hides every token of a row")
    if TOKEN_TYPE_IDS in tensors:
        rows[TOKEN_TYPE_IDS] = _integers(tensors[TOKEN_TYPE_IDS], shape, limits.token_types)
    if limits.takes_pooling_mask:
        rows[POOLING_MASK] = rows.get(POOLING_MASK, rows[ATTENTION_MASK]) & rows[ATTENTION_MASK]
    return rows


def pad(requests: Sequence[Rows], pad_id: int) -> Rows:
    """The rows of all requests in order, padded to the length of the longest."""
    count = sum(len(rows[INPUT_IDS]) for rows in requests)
    length = max(rows[INPUT_IDS].shape[1] for rows in requests)
    names = {name for rows in requests for name in rows}
    padded = {name: np.full((count, length), pad_id if name == INPUT_IDS else 0, dtype=np.int64) for name in names}
    first = 0
    for rows in requests:
        size, width = rows[INPUT_IDS].shape
        for name, values in rows.items():
            padded[name][first : first + size, :width] = values
        first += size
    return padded


def _check_shape(name: str, shape: tuple[int, ...], limits: RowLimits) -> None:
    if len(shape) not in (1, 2) or 0 in shape:
        raise InvalidRequestError(f"{name} must have shape [N] or [B, N] and hold ids, not {list(shape)}")
    if len(shape) == 2 and shape[0] > limits.max_rows:
        raise InvalidRequestError(f"a batch of {shape[0]}, at most {limits.max_rows} are allowed")
    if shape[-1] > limits.max_length:
        raise InvalidRequestError(f"{name} has {shape[-1]} tokens a row, the model takes {limits.max_length}")


def _integers(tensor: Tensor, shape: tuple[int, ...], below: int) -> Ids:
    if tensor.datatype not in ("INT64", "INT32"):
        raise InvalidRequestError(f"{tensor.name} must be INT64 or INT32, not {tensor.datatype}")
    if tensor.array.shape != shape:
        raise InvalidRequestError(
            f"{tensor.name} must have the shape {list(shape)} of {INPUT_IDS}, not {list(tensor.array.shape)}"
        )
    outside = (tensor.array < 0) | (tensor.array >= below)
    if outside.any():
        raise InvalidRequestError(f"{tensor.name}: {tensor.array[outside][0]} is outside of 0 to {below - 1}")
    return np.atleast_2d(tensor.array).astype(np.int64, copy=False)


class RowNetwork:
    """See the module."""

    def __init__(
        self, compute: Compute, limits: RowLimits, device: torch.device, dtype: torch.dtype, scaling: Scaling | None
    ) -> None:
        # A classifier with a decoder fails on a batch whose rows have different numbers of the id that ends a text.
        self.pads_rows = limits.end_id is None
        self.limits = limits
        self._scaling = scaling
        self._compute = compute
        self._device = device
        self._dtype = dtype

    def run(self, requests: Sequence[Rows]) -> list[Vectors]:
        """Returns the vectors [rows, size] of each request."""
        if not self.pads_rows or self._differ_in_stage(requests):
            return [np.concatenate([self._forward(row) for row in _single_rows(rows)]) for rows in requests]
        vectors = self._forward(pad(requests, self.limits.pad_id))
        ends = np.cumsum([len(rows[INPUT_IDS]) for rows in requests])
        return np.split(vectors, ends[:-1])

    def prove(self) -> int:
        """Decides whether rows can be padded; returns the size of a vector."""
        limits = self.limits
        special = limits.pad_id, limits.end_id
        ids = np.array([i for i in range(_LENGTHS[-1] + 2) if i not in special], dtype=np.int64)
        rows = [np.roll(ids, length)[: min(length, limits.max_length)] % limits.vocabulary_size for length in _LENGTHS]
        for row in rows:
            row[-1] = row[-1] if limits.end_id is None else limits.end_id
        plain = [_plain(row) for row in rows]
        alone = np.concatenate([self._forward(row) for row in plain[:-1]])
        if self.pads_rows:
            tolerance = _TOLERANCES.get(self._dtype, _LOW_PRECISION_TOLERANCE)
            try:
                padded = self._forward(pad(plain, limits.pad_id))[:-1]
                self.pads_rows = bool(np.abs(padded - alone).max() <= tolerance * max(1.0, np.abs(alone).max()))
            except (ValueError, IndexError, RuntimeError):
                self.pads_rows = False
        return int(alone.shape[1])

    def _differ_in_stage(self, requests: Sequence[Rows]) -> bool:
        if self._scaling is None:
            return False
        lengths = {length for rows in requests for length in (rows[INPUT_IDS].shape[1], *_lengths(rows))}
        return len(set(map(self._scaling.stage, lengths))) > 1

    @torch.inference_mode()
    def _forward(self, rows: Rows) -> Vectors:
        tensors = {name: torch.from_numpy(ids).to(self._device) for name, ids in rows.items()}
        vectors: Vectors = self._compute(tensors).float().cpu().numpy()
        return vectors


def _lengths(rows: Rows) -> list[int]:
    """Of each row, up to its last token that is not masked."""
    mask = rows[ATTENTION_MASK]
    lengths: list[int] = (mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)).tolist()
    return lengths


def _single_rows(rows: Rows) -> list[Rows]:
    return [{name: ids[i : i + 1, :end].copy() for name, ids in rows.items()} for i, end in enumerate(_lengths(rows))]


def _plain(ids: NDArray[np.int64]) -> Rows:
    row = ids[None].copy()
    return {INPUT_IDS: row, ATTENTION_MASK: np.ones_like(row)}


class EncoderModel(ServedModel):
    """Owns its thread."""

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
        self.statistics = self._worker.counts

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
