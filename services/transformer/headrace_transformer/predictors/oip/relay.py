"""Relays requests and answers as bytes, for models that need no text processing.

Errors keep their status and the hop that failed. While no predictor is ready a request waits, see retries.py; a request
that has begun to be answered is not retried.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.deadline import Deadline
from headrace.errors import NotReadyError
from headrace_transformer.predictors.oip.client import PredictorClient


class Relay:
    """Owned by the event loop; one for all requests; its methods raise HeadraceError."""

    def __init__(self, predictor: PredictorClient) -> None:
        self._predictor = predictor

    async def infer(self, request: bytes, deadline: Deadline, wait_s: float | None = None) -> bytes:
        """The one answer to a serialized ModelInferRequest, a serialized ModelInferResponse.

        `wait_s`: the longest wait for a predictor, None for the default.
        """
        backoff = self._predictor.backoff(deadline, wait_s)
        return await backoff.retry(lambda: self._predictor.infer_bytes(request, deadline))

    async def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The answers as they come, each a serialized ModelStreamInferResponse without error_message.

        Closing the generator cancels the request at the predictor.
        """
        backoff, begun = self._predictor.backoff(deadline), False
        while True:
            try:
                async with aclosing(self._predictor.stream_bytes(request, deadline)) as responses:
                    async for response in responses:
                        begun = True
                        yield response
                return
            except NotReadyError as error:
                if begun:
                    raise
                not_ready = error
            await backoff.pause(not_ready, not_ready.retry_after_ms)
