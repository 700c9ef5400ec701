"""The tensors of a message for its record: names, datatypes and shapes, and raw contents by reference.

`DeferredTensors` are made on the event loop and cost nothing there: they keep the message, parsed or serialized. The
thread that writes parses only heads (name, datatype, shape). Raw contents are views of the message's bytes, because a
parser would copy 60 MB while the event loop waits for the interpreter lock. Typed contents of up to 1 MiB are converted
to raw ones; of larger ones neither contents nor digests are recorded.

If no digest is configured, `heads` copies the heads on the event loop, in a few microseconds, and the message is not
kept. The size of typed contents is computed from datatype and shape.

A tensor whose contents do not fit its shape has none here, and a message that cannot be parsed has no tensors: no
record fails because of them.

Source of the format: protobuf's wire encoding; field numbers are those of inference.proto.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from headrace.errors import HeadraceError
from headrace.oip.raw_contents import RAW_INPUTS, RAW_OUTPUTS
from headrace.oip.tensors import BYTES, DATATYPES, decode, dtype_of, encode_raw
from headrace.payload.parts import DeferredTensors, RecordedTensor, Tensors
from headrace.rpc.limits.wire_limits import fields
from headrace_protos import inference_pb2 as pb

MAX_FIELDS = 1024  # The most fields that are read of one message.

_TENSORS = 5  # inputs of ModelInferRequest, outputs of ModelInferResponse.
_MESSAGES: dict[int, type[pb.ModelInferRequest | pb.ModelInferResponse]] = {
    RAW_INPUTS: pb.ModelInferRequest,
    RAW_OUTPUTS: pb.ModelInferResponse,
}
_STREAMED = 2  # infer_response of ModelStreamInferResponse.
_HEAD = frozenset({1, 2, 3})  # Of InferInputTensor and InferOutputTensor, which have the same fields.
_MAX_VARINT_BYTES = 10
_TYPED_BYTES = 1 << 20  # The most typed contents that are converted.
_MAX_HEAD_FIELDS = 64  # The most fields that the event loop reads of one message.
_SMALL_BYTES = 1024  # A tensor's description of up to this size is copied whole.
_ITEM_BYTES = {datatype: dtype_of("", datatype).itemsize for datatype in DATATYPES - {BYTES}}
_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63 - 1
_new_tuple = tuple.__new__  # Without a Python function call: every small tensor pays for it.


class _TooManyError(DecodeError):
    """A message has too many fields."""


def request_tensors(request: bytes | pb.ModelInferRequest) -> DeferredTensors:
    """The inputs of a request; bytes are a serialized ModelInferRequest."""
    return _source(request, RAW_INPUTS)


def answer_tensors(answer: bytes | pb.ModelInferResponse) -> DeferredTensors:
    """The outputs of an answer; bytes are a serialized ModelInferResponse."""
    return _source(answer, RAW_OUTPUTS)


def streamed_tensors(answer: bytes | pb.ModelInferResponse) -> DeferredTensors:
    """The outputs of one answer of a stream; bytes are a serialized ModelStreamInferResponse."""
    if not isinstance(answer, bytes):
        return answer_tensors(answer)
    if len(answer) <= _SMALL_BYTES:  # Kept whole.
        return DeferredTensors(partial(_tensors, answer, RAW_OUTPUTS, True), len(answer), message=answer)
    return _serialized(answer, RAW_OUTPUTS, True)


def _source(message: bytes | pb.ModelInferRequest | pb.ModelInferResponse, raw_field: int) -> DeferredTensors:
    if isinstance(message, bytes):
        return _serialized(message, raw_field, False)
    heads = _parsed_heads(message)
    are_measured = all(head.size is not None for head in heads)
    whole = DeferredTensors(
        lambda: _tensors(message.SerializeToString(), raw_field, False),
        _memory_of(message, heads),
        lambda most_bytes: whole if most_bytes else heads,
        heads if are_measured else None,
    )
    return whole


def _serialized(message: bytes, raw_field: int, is_streamed: bool) -> DeferredTensors:
    read = partial(_tensors, message, raw_field, is_streamed)
    return DeferredTensors(read, len(message), partial(_heads, message, raw_field, is_streamed))


def _tensors(message: bytes, raw_field: int, is_streamed: bool) -> list[RecordedTensor]:
    try:
        return _read(memoryview(message), raw_field, is_streamed, MAX_FIELDS, _TYPED_BYTES)
    except DecodeError:
        return []


def _heads(message: bytes, raw_field: int, is_streamed: bool, most_bytes: int) -> Tensors:
    """Copies the tensors' heads, and contents of at most `most_bytes`; keeps a message of too many fields whole."""
    most_typed = _SMALL_BYTES + _MAX_VARINT_BYTES * most_bytes
    try:
        tensors = _read(memoryview(message), raw_field, is_streamed, _MAX_HEAD_FIELDS, most_typed)
    except _TooManyError:
        return DeferredTensors(partial(_tensors, message, raw_field, is_streamed), len(message))
    except DecodeError:
        return ()
    return [_copied(tensor, most_bytes) for tensor in tensors]


def _copied(tensor: RecordedTensor, most_bytes: int) -> RecordedTensor:
    if tensor.data is None:
        return tensor
    data = bytes(tensor.data) if len(tensor.data) <= most_bytes else None
    return tensor._replace(data=data, size=len(tensor.data))


def _parsed_heads(message: pb.ModelInferRequest | pb.ModelInferResponse) -> Sequence[RecordedTensor]:
    """The heads of a parsed message; the contents are not read, because reading copies them."""
    tensors = message.inputs if isinstance(message, pb.ModelInferRequest) else message.outputs
    return [
        RecordedTensor(each.name, each.datatype, tuple(each.shape), None, _size(each.datatype, each.shape))
        for each in tensors[:MAX_FIELDS]
    ]


def _memory_of(message: pb.ModelInferRequest | pb.ModelInferResponse, heads: Sequence[RecordedTensor]) -> int:
    """The size of a parsed message; of a large one by its tensors' shapes, because protobuf copies it to measure it."""
    sizes = [head.size for head in heads]
    described = sum(size for size in sizes if size is not None)
    return described if described > _SMALL_BYTES and None not in sizes else message.ByteSize()


def _size(datatype: str, shape: Sequence[int]) -> int | None:
    """The size of a tensor's raw contents; None for texts, and if the shape is invalid."""
    if datatype not in _ITEM_BYTES or len(shape) > _MAX_DIMENSIONS:
        return None
    size = _ITEM_BYTES[datatype] * math.prod(shape)
    return size if 0 <= size <= _MAX_SIZE else None


def _tensors_of(parsed: pb.ModelInferRequest | pb.ModelInferResponse) -> list[RecordedTensor] | None:
    """The tensors of a small message, which protobuf parses faster; None if their contents are not raw."""
    described: Any  # Inputs and outputs have the same fields.
    if isinstance(parsed, pb.ModelInferRequest):
        described, raw = parsed.inputs, parsed.raw_input_contents
    else:
        described, raw = parsed.outputs, parsed.raw_output_contents
    if len(raw) != len(described):
        return None
    return [
        _new_tuple(RecordedTensor, (each.name, each.datatype, each.shape, data, None))
        for each, data in zip(described, raw, strict=True)
    ]


def _read(
    message: memoryview, raw_field: int, is_streamed: bool, most_fields: int, most_typed: int
) -> list[RecordedTensor]:
    """The tensors of a serialized message, with typed contents of so many bytes; raises DecodeError."""
    if len(message) <= _SMALL_BYTES:
        kind = pb.ModelStreamInferResponse if is_streamed else _MESSAGES[raw_field]
        parsed = kind.FromString(bytes(message))
        tensors = _tensors_of(parsed.infer_response if isinstance(parsed, pb.ModelStreamInferResponse) else parsed)
        if tensors is not None:
            return tensors
    if is_streamed:
        answers = _contents_of(message, {_STREAMED}, most_fields).get(_STREAMED, [])
        return [tensor for answer in answers for tensor in _read(answer, raw_field, False, most_fields, most_typed)]
    found = _contents_of(message, {_TENSORS, raw_field}, most_fields)
    described, raw = found.get(_TENSORS, []), found.get(raw_field, [])
    if len(raw) != len(described):
        raw = []  # The request will be refused: it is unknown which contents belong to which tensor.
    return [_tensor(each, raw[number] if raw else None, most_typed) for number, each in enumerate(described)]


def _tensor(described: memoryview, raw: memoryview | None, most_typed: int) -> RecordedTensor:
    """One tensor, with its raw contents or the typed ones in its description."""
    try:
        if raw is None and len(described) <= most_typed:
            whole = pb.ModelInferRequest.InferInputTensor.FromString(bytes(described))
            data = _as_raw(whole)
            size = None if data is not None else _size(whole.datatype, whole.shape)
            return RecordedTensor(whole.name, whole.datatype, tuple(whole.shape), data, size)
        head = [
            described[start:end] for field, start, _, end in islice(fields(described), MAX_FIELDS) if field in _HEAD
        ]
        read = pb.ModelInferRequest.InferInputTensor.FromString(b"".join(head))
    except DecodeError:
        return RecordedTensor("", "", (), None)
    return RecordedTensor(read.name, read.datatype, tuple(read.shape), raw, _size(read.datatype, read.shape))


def _as_raw(typed: pb.ModelInferRequest.InferInputTensor) -> bytes | None:
    """Typed contents as raw ones; None if they do not fit the shape or the datatype."""
    try:
        [tensor] = decode([typed], (), "input").values()
    except HeadraceError:
        return None
    return encode_raw(tensor)


def _contents_of(message: memoryview, wanted: set[int], most: int) -> dict[int, list[memoryview]]:
    """The contents of the wanted fields, by field and in order; raises DecodeError, also for too many fields."""
    found: dict[int, list[memoryview]] = {}
    for count, (field, _, start, end) in enumerate(fields(message)):
        if count >= most:
            raise _TooManyError("too many fields")
        if field in wanted:
            found.setdefault(field, []).append(message[start:end])
    return found
