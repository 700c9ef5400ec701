"""A request or an answer apart from the raw contents of its tensors, which are neither parsed nor copied.

protobuf copies raw contents when it parses a message, when Python reads them, when they are added to a message and when
that is serialized. These functions copy them once, into the serialized message.

Source of the format: protobuf's wire encoding; field numbers are those of inference.proto.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from headrace.oip.tensors import BYTES, RawTensor, Tensor, check_dtype, encode_raw
from headrace.rpc.limits.wire_limits import field_head, fields
from headrace_protos import inference_pb2 as pb

RAW_INPUTS, RAW_OUTPUTS = 7, 6  # raw_input_contents of ModelInferRequest, raw_output_contents of ModelInferResponse.

Contents = bytes | memoryview
M = TypeVar("M", pb.ModelInferRequest, pb.ModelInferResponse)

_SMALL_BYTES = 4096  # A message of this size is parsed as a whole.
# Beyond so many fields the C parser is faster than a scan, and no message can block the event loop with one.
_MAX_SCANNED_FIELDS = 1024


def scan(data: bytes) -> Sequence[tuple[int, int, int, int]] | None:
    """The fields of a message, see wire_limits.py; None for one that the parser reads faster, or better."""
    try:
        found = list(islice(fields(data), _MAX_SCANNED_FIELDS + 1))
    except DecodeError:
        return None
    return found if len(found) <= _MAX_SCANNED_FIELDS else None


def split(kind: type[M], data: bytes) -> tuple[M, Sequence[Contents]]:
    """The parsed message and its raw contents, which the message itself may lack; raises protobuf's DecodeError."""
    found = None if len(data) <= _SMALL_BYTES else scan(data)
    if found is None:
        message = kind.FromString(data)
        if isinstance(message, pb.ModelInferRequest):
            return message, message.raw_input_contents
        return message, message.raw_output_contents
    view, rest, contents = memoryview(data), [], []
    raw_field = RAW_INPUTS if kind is pb.ModelInferRequest else RAW_OUTPUTS
    for field, start, begin, end in found:
        if field == raw_field:
            contents.append(view[begin:end])
        else:
            rest.append(view[start:end])
    return kind.FromString(b"".join(rest)), contents


def joined(message: pb.ModelInferRequest | pb.ModelInferResponse, contents: Iterable[Contents]) -> bytes:
    """The serialized message, which has no raw contents of its own, with these."""
    raw_field = RAW_INPUTS if isinstance(message, pb.ModelInferRequest) else RAW_OUTPUTS
    pieces: list[Contents] = [message.SerializeToString()]
    for each in contents:
        pieces += (field_head(raw_field, len(each)), each)
    return b"".join(pieces)


def raw_contents(tensor: Tensor | RawTensor) -> Contents:
    """The tensor's raw contents, without a copy where they are large; the array must not change while they are used.

    Raises InvalidRequestError if the array has not the datatype's numpy type.
    """
    if isinstance(tensor, RawTensor):
        return tensor.data
    if tensor.datatype == BYTES or tensor.array.nbytes <= _SMALL_BYTES or not tensor.array.flags.c_contiguous:
        return encode_raw(tensor)
    check_dtype(tensor)
    return tensor.array.reshape(-1).view(np.uint8).data
