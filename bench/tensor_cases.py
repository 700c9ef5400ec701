"""The calls of the transport benchmark: requests as bytes, and the comparison of their answers. Pure.

Every case has one input `x`; its answer has the same tensor under the same name. A stream's request has one number, and
its answers one each: 0, 1, 2, …
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import orjson

from headrace_protos import inference_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
MESSAGES = 64

_TYPES = {"INT64": "<i8", "FP32": "<f4"}
_LOOK = 64  # Bytes that are compared at the end and in the middle of each answer.


@dataclass(frozen=True)
class Case:
    """`callers`, each with one request at a time, a tensor of `shape`. `streams`: with `MESSAGES` answers each."""

    callers: int
    datatype: str
    shape: tuple[int, ...]
    streams: bool = False

    @cached_property
    def tensor(self) -> bytes:
        """The raw contents: numbers below 50,000, such as token ids; for FP32 they have fractions."""
        numbers = np.arange(math.prod(self.shape)) % 50_000
        values = numbers * 0.37 if self.datatype == "FP32" else numbers
        return values.astype(_TYPES[self.datatype]).tobytes()

    @cached_property
    def json_data(self) -> bytes:
        """The same as JSON."""
        return orjson.dumps(np.frombuffer(self.tensor, _TYPES[self.datatype]).tolist())

    def request(self, model: str) -> bytes:
        """A serialized ModelInferRequest."""
        request = pb.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype=self.datatype, shape=self.shape)
        request.raw_input_contents.append(self.tensor)
        return request.SerializeToString()

    def json_request(self) -> bytes:
        """The body of a V2 REST request."""
        head = orjson.dumps({"name": "x", "datatype": self.datatype, "shape": self.shape})
        return b'{"inputs":[' + head[:-1] + b',"data":' + self.json_data + b"}]}"


class Comparison:
    """Compares answers with the case's request: the first one whole, the others in length and in a few bytes.

    The methods return whether an answer is right.
    """

    def __init__(self, case: Case) -> None:
        self._tensor = case.tensor
        self._json_data = case.json_data
        half = len(self._tensor) // 2
        self._from_end = len(self._tensor) - half
        self._middle, self._end = self._tensor[half : half + _LOOK], self._tensor[-_LOOK:]
        self._length = 0

    def is_right(self, answer: bytes) -> bool:
        """Checks a serialized ModelInferResponse, whose last field is the tensor."""
        if not self._length:
            (raw,) = pb.ModelInferResponse.FromString(answer).raw_output_contents or (b"",)
            if raw != self._tensor:
                return False
            self._length = len(answer)
        return (
            len(answer) == self._length
            and answer.endswith(self._end)
            and answer.startswith(self._middle, len(answer) - self._from_end)
        )

    def is_right_json(self, answer: bytes) -> bool:
        """Checks a V2 REST answer, always whole."""
        return self._json_data in answer

    def are_right(self, answers: Sequence[bytes]) -> bool:
        """Checks the serialized ModelStreamInferResponses of one request, always whole."""
        return len(answers) == MESSAGES and all(
            answer.endswith(number.to_bytes(8, "little")) for number, answer in enumerate(answers)
        )


CASES = {
    "tok": Case(16, "INT64", (16, 2048)),
    "tok-1": Case(1, "INT64", (16, 2048)),
    "img": Case(16, "FP32", (4, 3, 224, 224)),
    "tiny": Case(16, "INT64", (1, 8)),
    "stream": Case(16, "INT64", (1,), streams=True),
}
