"""Answers of a ModelStreamInfer call that are ready together, as one message from the predictor to the transformer.

gRPC costs both services more for each message than a small answer takes otherwise. A caller that sends the metadata
JOINS_ANSWERS can read JoinedAnswers (stream_answers.proto) in the place of an answer; other callers get none.
Nothing waits to be joined: an answer that is alone goes alone, as does a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headrace.oip.tensors import BYTES
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace_protos.inference_pb2 import ModelStreamInferResponse
from headrace_protos.stream_answers_pb2 import JoinedAnswers

JOINS_ANSWERS = ("x-headrace-joins-answers", "true")
_FIRST_BYTE = bytes([15 << 3 | 2])  # Of JoinedAnswers: the number and the wire type of its field.
_MAX_BYTES = 4096
_MAX_NUMBERS = _MAX_BYTES // 8


def takes_joined(context: Context) -> bool:
    """Whether the caller reads JoinedAnswers."""
    return JOINS_ANSWERS in call_metadata(context)


def may_join(answer: ModelStreamInferResponse) -> bool:
    """Whether an answer is small; a large one is not measured, because protobuf measures it with a copy."""
    return (
        all(
            output.datatype != BYTES and math.prod(output.shape) <= _MAX_NUMBERS
            for output in answer.infer_response.outputs
        )
        and answer.ByteSize() <= _MAX_BYTES
    )


def joined(answers: Iterable[ModelStreamInferResponse]) -> ModelStreamInferResponse:
    """The answers as one message: its JoinedAnswers are fields that protobuf does not know there, and passes on."""
    together = JoinedAnswers(answers=[answer.SerializeToString() for answer in answers])
    return ModelStreamInferResponse.FromString(together.SerializeToString())


def separate(message: bytes) -> Sequence[bytes]:
    """The answers of a serialized message, which may be one; raises DecodeError."""
    return JoinedAnswers.FromString(message).answers if message.startswith(_FIRST_BYTE) else (message,)
