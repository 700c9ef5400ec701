"""Requests as bytes to a predictor, and its answers as bytes back: what needs no text processing.

One call at the predictor for each request, as for a generation: cancel, deadline and flow control are
HTTP/2's own. Errors keep their status and the hop that failed. While no predictor is ready a request waits, see
retries.py; a request that has begun to be answered is not retried. Metadata tell the predictor that the request is
recorded here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from google.protobuf.message import DecodeError

from millrace.deadline import Deadline
from millrace.errors import HopBrokenError, NotReadyError, RequestFailedError
from millrace.oip.wire_fields import fields
from millrace.payload.call import RECORDED
from millrace.rpc.client_interceptors import CallSpan
from millrace_protos import inference_pb2 as pb
from services.transformer.predictors.client import ERRORS_AS_STATUS, PredictorClient

_ERROR_MESSAGE = 1  # Field number in ModelStreamInferResponse.


class Relay:
    """Owned by the event loop; one for all requests; its methods raise MillraceError."""

    def __init__(self, predictor: PredictorClient) -> None:
        self._predictor = predictor

    async def infer(self, request: bytes, deadline: Deadline) -> bytes:
        """The one answer to a serialized ModelInferRequest, a serialized ModelInferResponse."""
        return await self._predictor.backoff(deadline).retry(
            lambda: self._predictor.infer_bytes(request, timeout=deadline.left(), metadata=(RECORDED,))
        )

    async def stream(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The answers as they come, each a serialized ModelStreamInferResponse without error_message.

        Closing the generator cancels the request at the predictor. Marks of the last response are the
        predictor's: it reads what the request says of them.
        """
        backoff, begun = self._predictor.backoff(deadline), False
        while True:
            try:
                async with aclosing(self._call(request, deadline)) as responses:
                    async for response in responses:
                        begun = True
                        yield response
                return
            except NotReadyError as error:
                if begun:
                    raise
                not_ready = error
            await backoff.pause(not_ready, not_ready.retry_after_ms)

    async def _call(self, request: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        span = CallSpan()
        with span.of_next_call():
            metadata = (ERRORS_AS_STATUS, RECORDED)
            call = self._predictor.stream_bytes(request, timeout=deadline.left(), metadata=metadata)
        try:
            async for response in call:
                _raise_error(response)
                span.message()
                yield response
        finally:
            call.cancel()


def _raise_error(response: bytes) -> None:
    """Raises the error that a response carries, of a predictor that does not end the call with it."""
    try:
        if all(field != _ERROR_MESSAGE for field, *_ in fields(response)):
            return
        message = pb.ModelStreamInferResponse.FromString(response).error_message
    except DecodeError:
        raise HopBrokenError("the predictor's answer is not the message that it must be", hop="predictor") from None
    if message:
        raise RequestFailedError(message, hop="predictor")
