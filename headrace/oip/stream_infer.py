"""`ModelStreamInfer` for any servicer: many requests multiplexed on one call, answered as they come.

Each request runs in its own task, so that a slow one does not delay others. A request that fails gives a response with
`error_message` and its id, and the stream continues; with the metadata `triton_grpc_error: true` (Triton's own switch)
the first error ends the call with its real status instead. Half-close ends the call after the last answer; cancelling
it cancels every request.

`triton_final_response` is true on the last response of a request, which `answer` marks, and on an error. A request with
the parameter `triton_enable_empty_final_response` gets an empty response as its last one instead, unless it fails.
Answers in bytes, a serialized ModelStreamInferResponse each, pass as they are: they come from a server that has marked
them itself.

Between our services a gRPC message costs more than a small answer takes otherwise. So a caller that sends the metadata
JOINS_ANSWERS may get JoinedAnswers (stream_answers.proto) in the place of an answer: in one message those that are
ready together. Nothing waits to be joined, and a large answer goes alone.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from headrace.errors import HeadraceError, RequestFailedError
from headrace.oip.tensors import BYTES
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.rpc.limits.request_reading import RequestStream
from headrace_protos.inference_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse
from headrace_protos.stream_answers_pb2 import JoinedAnswers

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 1024  # Requests on one call; reading stops there, and HTTP/2 holds the client back.
_UNREAD_RESPONSES = 16  # Beyond these, requests wait for the reader, and their own slots merge.

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
JOINS_ANSWERS = ("x-headrace-joins-answers", "true")
_FIRST_BYTE = bytes([15 << 3 | 2])  # Of JoinedAnswers: the number and the wire type of its field.
_MAX_JOINED_BYTES = 4096


class StreamRequest(Protocol):
    """The parts of a ModelInferRequest that are used here."""

    @property
    def model_name(self) -> str: ...

    @property
    def model_version(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, InferParameter]: ...


RequestT = TypeVar("RequestT", bound=StreamRequest)
Answer = Callable[[RequestT], AsyncGenerator[ModelInferResponse | bytes, None]]
Item = ModelStreamInferResponse | bytes | HeadraceError | None  # Of the queue of a call; None is its end.


def errors_as_status(context: Context) -> bool:
    """Whether the caller wants an error as the call's status."""
    return ("triton_grpc_error", "true") in tuple(context.invocation_metadata() or ())


def wants_empty_final(request: StreamRequest) -> bool:
    """Whether the request asks for an empty response as its last one."""
    return EMPTY_FINAL in request.parameters and request.parameters[EMPTY_FINAL].bool_param


async def multiplex(
    requests: AsyncIterator[RequestT], answer: Answer[RequestT], as_status: bool, joins: bool = False
) -> AsyncGenerator[Any, None]:
    """Answers every request of a stream with what `answer` yields for it: ModelStreamInferResponse, or bytes.

    With `joins`, one response may be several.
    """
    responses: asyncio.Queue[Item] = asyncio.Queue(_UNREAD_RESPONSES)
    held: deque[Item] = deque()  # Taken from the queue, and not yielded yet.
    room = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def run(request: RequestT, finish: Callable[[], None]) -> None:
        try:
            await _answer_one(request, answer, responses)
        except HeadraceError as error:
            await responses.put(error if as_status else _error_response(request, error.message))
        except Exception:
            logger.exception("request %s on a stream failed", request.id)
            failure = RequestFailedError("internal error")
            await responses.put(failure if as_status else _error_response(request, failure.message))
        finally:
            finish()
            room.release()

    async def read() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    async for request in requests:
                        await room.acquire()
                        try:
                            finish = requests.take() if isinstance(requests, RequestStream) else lambda: None
                        except HeadraceError as error:
                            room.release()
                            await responses.put(error if as_status else _error_response(request, error.message))
                        else:
                            group.create_task(run(request, finish))
                except HeadraceError as error:
                    # An unparseable request has no id, so the call ends.
                    await responses.put(error)
        except Exception:
            logger.exception("a stream's requests could not be read")
            await responses.put(RequestFailedError("internal error"))
        else:
            await responses.put(None)

    reader = asyncio.create_task(read(), name="stream-infer")
    try:
        while (response := await (_joined_next(responses, held) if joins else responses.get())) is not None:
            if isinstance(response, HeadraceError):
                try:
                    raise response
                finally:
                    del response  # Its traceback refers to this frame, and to those that hold the request.
            yield response
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _joined_next(responses: asyncio.Queue[Item], held: deque[Item]) -> Item:
    """The next of a queue, one with all that follow it there if they are small; `held` is for the first that is not."""
    item = held.popleft() if held else await responses.get()
    together: list[ModelStreamInferResponse] = []
    while isinstance(item, ModelStreamInferResponse) and may_join(item):
        together.append(item)
        if responses.empty():
            break
        item = responses.get_nowait()
    else:
        if not together:
            return item
        held.append(item)
    return together[0] if len(together) == 1 else joined(together)


async def _answer_one(request: RequestT, answer: Answer[RequestT], responses: asyncio.Queue[Item]) -> None:
    empty_final = wants_empty_final(request)
    async with aclosing(answer(request)) as answers:
        async for response in answers:
            if isinstance(response, bytes):
                empty_final = False
                await responses.put(response)
                continue
            final = response.parameters[FINAL].bool_param and not empty_final
            response.parameters[FINAL].bool_param = final
            await responses.put(ModelStreamInferResponse(infer_response=response))
    if empty_final:
        last = ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
        last.parameters[FINAL].bool_param = True
        await responses.put(ModelStreamInferResponse(infer_response=last))


def _error_response(request: StreamRequest, message: str) -> ModelStreamInferResponse:
    """Carries the id, by which a client with many requests on the stream knows which one failed; nothing follows."""
    about = ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    about.parameters[FINAL].bool_param = True
    return ModelStreamInferResponse(error_message=message, infer_response=about)


def takes_joined(context: Context) -> bool:
    """Whether the caller reads JoinedAnswers."""
    return JOINS_ANSWERS in call_metadata(context)


def may_join(answer: ModelStreamInferResponse) -> bool:
    """Whether an answer is small; a large one is not measured, because protobuf measures it with a copy."""
    return (
        all(
            output.datatype != BYTES and 8 * math.prod(output.shape) <= _MAX_JOINED_BYTES
            for output in answer.infer_response.outputs
        )
        and answer.ByteSize() <= _MAX_JOINED_BYTES
    )


def joined(answers: Iterable[ModelStreamInferResponse]) -> ModelStreamInferResponse:
    """The answers as one message: its JoinedAnswers are fields that protobuf does not know there, and passes on."""
    together = JoinedAnswers(answers=[answer.SerializeToString() for answer in answers])
    return ModelStreamInferResponse.FromString(together.SerializeToString())


def separate(message: bytes) -> Sequence[bytes]:
    """The answers of a serialized message, which may be one; raises DecodeError."""
    return JoinedAnswers.FromString(message).answers if message.startswith(_FIRST_BYTE) else (message,)
