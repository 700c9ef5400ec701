"""The relay of one request, which counts token ids: those that go to a predictor and those that come back.

For a client whose key limits tokens. A tensor of another name, of a model of the user's own, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from headrace.clients import Client
from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace.oip.model_description import INPUT_IDS, OUTPUT_IDS
from headrace.oip.raw_contents import split
from headrace.payload.recording import Recording
from headrace_protos import inference_pb2 as pb
from headrace_transformer.generation.token_quota import Reservation, TokenQuota
from headrace_transformer.predictors.relay import Relay

_MAX_TOKENS = "max_tokens"


class CountedRelay(Relay):
    """Raises what TokenQuota raises, and InvalidRequestError where a model that generates could take any number."""

    def __init__(self, relay: Relay, quota: TokenQuota, client: Client, recording: Recording, generates: bool) -> None:
        self._relay = relay
        self._quota = quota
        self._client = client
        self._recording = recording
        self._generates = generates

    async def infer(self, request: bytes, deadline: Deadline, wait_s: float | None = None) -> bytes:
        async with self._charged(request) as reservation:
            answer = await self._relay.infer(request, deadline, wait_s)
            reservation.generated = _ids(split(pb.ModelInferResponse, answer)[0].outputs, OUTPUT_IDS)
            return answer

    async def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        async with (
            self._charged(request) as reservation,
            aclosing(self._relay.stream(request, deadline)) as answers,
        ):
            async for answer in answers:
                message = pb.ModelStreamInferResponse.FromString(answer).infer_response
                reservation.generated += _ids(message.outputs, OUTPUT_IDS)
                yield answer

    @asynccontextmanager
    async def _charged(self, request: bytes) -> AsyncIterator[Reservation]:
        prompt_tokens, max_tokens = self._wanted(request)
        with await self._quota.charged(self._client, prompt_tokens, max_tokens) as reservation:
            self._recording.prompt_tokens = prompt_tokens
            try:
                yield reservation
            finally:
                self._recording.completion_tokens = reservation.generated

    def _wanted(self, request: bytes) -> tuple[int, int]:
        """The tokens of the prompt, and of the answer at most."""
        message, _ = split(pb.ModelInferRequest, request)
        most: Mapping[str, pb.InferParameter] = message.parameters
        if self._generates and _MAX_TOKENS not in most:
            raise InvalidRequestError(
                f"{_MAX_TOKENS} is needed: the key of {self._client.name} has a limit of tokens", param=_MAX_TOKENS
            )
        return _ids(message.inputs, INPUT_IDS), max(0, most[_MAX_TOKENS].int64_param) if _MAX_TOKENS in most else 0


def _ids(tensors: Iterable[Any], name: str) -> int:
    shapes = (tensor.shape for tensor in tensors if tensor.name == name)
    return sum(math.prod(shape) for shape in shapes if min(shape, default=0) > 0)
