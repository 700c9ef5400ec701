"""Parses a predictor's answers; errors in them are the predictor's fault, never the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError

from headrace.errors import HopBrokenError, InvalidRequestError
from headrace.oip.raw_contents import Contents
from headrace.oip.tensors import Tensor, decode
from headrace_protos import inference_pb2


class BrokenAnswerError(HopBrokenError):
    """The predictor breaks the protocol: the same request would have the same answer, so it is not sent again."""


@contextmanager
def predictor_answers() -> Iterator[None]:
    """Converts errors of the block, which parses an answer, to BrokenAnswerError."""
    try:
        yield
    except InvalidRequestError as error:
        raise BrokenAnswerError(f"the predictor's answer: {error.message}", hop="predictor") from None
    except (DecodeError, TypeError, ValueError, OverflowError):
        raise BrokenAnswerError("the predictor's answer is not the message that it must be", hop="predictor") from None


def outputs_of(response: inference_pb2.ModelInferResponse, contents: Sequence[Contents]) -> dict[str, Tensor]:
    """The response's outputs by name, from its raw contents."""
    with predictor_answers():
        return decode(response.outputs, contents, "output")


def numbers_of(outputs: Mapping[str, Tensor], name: str, kinds: str) -> list[Any]:
    """The values of an output, flat; empty where there is none. `kinds` are the numpy kinds that it may have."""
    if name not in outputs:
        return []
    array = outputs[name].array
    if array.dtype.kind not in kinds:
        raise BrokenAnswerError(f"the predictor's {name} is {outputs[name].datatype}", hop="predictor")
    values: list[Any] = array.ravel().tolist()
    return values
