"""Serves a folder with a `model.py`: the user's own code, which takes and returns tensors.

The file defines one function, in one of two forms:

    async def execute(request):              async def execute(request):
        return {"name": array}                   yield {"name": array}

The first returns one response. The second sends one response for each `yield`, at once; that model is decoupled in
Triton's terms, and `ModelInfer` accepts it only if it yields at most once (more is refused; no yield is an empty
response). `request` is a `Request`. A result maps names to numpy arrays or to `RawTensor`s of headrace.oip.tensors:
those of `request.raw` unchanged, or BF16, which numpy lacks. `Response(outputs, parameters)` of headrace.python_tensors
adds parameters. The file may also define

    INPUTS = {"name": ("FP32", [-1, 3])}     requests are checked against it; without it all pass
             ("FP32", [1], {"optional": True}) is an input that may be left out
    OUTPUTS = {"name": ("FP32", [-1])}       for metadata
    async def load(folder), unload()         run once each, before the first request and after the last

`raise InvalidRequestError(text)` (headrace.errors) refuses a request, as do the other HeadraceErrors. Any other
exception, including SystemExit, fails the request as INTERNAL, with the traceback in the log. Other requests continue.

Each model has its own thread with an event loop, so code that blocks delays only its own model's requests. If it blocks
for longer than `timeout_s`, `died` raises and the model's requests end with HopBrokenError: the process must be
restarted. `max_running` requests run at the same time, `max_waiting` wait, further ones are refused with
OverloadedError. A few results are buffered for a slow reader; then the generator waits. A caller that leaves, or whose
deadline passes, cancels the coroutine or closes the generator; the slot is free once that has ended.

`triton_final_response` of a stream: whether a generator's result is its last one is unknown until the generator
continues, and results are not held back for that. A result is marked as final if the generator has ended by the time
the result is sent; a client that must be sure requests the empty final response.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from headrace.errors import (
    HeadraceError,
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
)
from headrace.oip.model_description import ModelDescription, check_inputs, check_names
from headrace.oip.parameters import read_parameters
from headrace.oip.stream_infer import FINAL
from headrace.oip.tensors import BYTES, Array, RawTensor, add_output, add_raw_output, decode_raw, raw_inputs
from headrace.python_tensors import BadResultError, Response, as_mapping, as_tensor, write_response_parameters
from headrace_predictor.engine.interface import EngineDeadError, Outcome, RequestCounts
from headrace_predictor.models.served_model import ANY_CALLER, VERSION, Caller, Responses, ServedModel
from headrace_predictor.tensor_models.loop_thread import Channel, LoopThread, Mailbox, ReaderLeftError
from headrace_predictor.tensor_models.python_code import PythonCode
from headrace_protos import inference_pb2 as pb

logger = logging.getLogger(__name__)

_UNREAD_RESPONSES = 16  # Small ones; a large one counts as four.
_LARGE_WEIGHT, _SMALL_NUMBERS = 4, 1024


class Request:
    """The argument of `execute`.

    `id` is the client's. `parameters` are the request's, as bool, int, float or str. `inputs` maps names to numpy
    arrays: BYTES are object arrays of `bytes`, BF16 the bits as uint16; types of fixed size are read-only views of the
    message. `raw` has the same tensors, not decoded.
    """

    def __init__(self, message: pb.ModelInferRequest) -> None:
        self.id: str = message.id
        self.parameters: dict[str, Any] = read_parameters(message.parameters)
        self.raw: Mapping[str, RawTensor] = raw_inputs(message)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        return {name: decode_raw(name, tensor) for name, tensor in self.raw.items()}


def write_result(request: pb.ModelInferRequest, result: Any) -> pb.ModelInferResponse:
    """Converts a result of `execute` to a response with the outputs that the request names, or with all of them."""
    parameters = result.parameters if isinstance(result, Response) else {}
    outputs = as_mapping(result.outputs if isinstance(result, Response) else result, "the model")
    names = [output.name for output in request.outputs]
    check_names("output", names, outputs)
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
    write_response_parameters(response, parameters)
    for name in names or outputs:
        tensor = as_tensor(name, outputs[name], "the model")
        if isinstance(tensor, RawTensor):
            add_raw_output(response, name, tensor)
        else:
            add_output(response, tensor)
    return response


class _Admission:
    """Limits how many requests of a model run at the same time, and how many wait, in order of arrival."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def enter(self, retry_after_ms: int) -> None:
        """Waits for a slot, which `leave` frees; raises OverloadedError if too many wait."""
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise OverloadedError(f"the queue is full: {self._max_waiting} wait", retry_after_ms=retry_after_ms)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        self._slots.release()


class PythonModel(ServedModel):
    """Created on a thread that may block, used by one event loop."""

    def __init__(self, name: str, folder: Path, max_running: int, max_waiting: int, timeout_s: float = 300.0) -> None:
        self.name = name
        self.statistics = RequestCounts()
        self._admission = _Admission(max_running, max_waiting)
        self.thread = LoopThread(f"model-{name}")
        try:
            self._code = self.thread.call(partial(_load, name, folder))
        except BaseException:
            self.thread.stop()
            raise
        self.thread.watch(timeout_s)
        self._mailbox: Mailbox | None = None  # Of the event loop that uses the model.
        self._open: set[Channel[pb.ModelInferResponse]] = set()
        self.description = ModelDescription(
            platform="python",
            inputs=self._code.inputs or (),
            outputs=self._code.outputs or (),
            decoupled=self._code.streams,
        )
        logger.info("model %s: %s of %s", name, "a generator" if self._code.streams else "a function", folder)

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        answer = None
        async with aclosing(self._answers(request)) as answers:
            async for response, _ in answers:
                if answer is not None:
                    raise InvalidRequestError(
                        f"model {self.name!r} answers this with more than one response; use ModelStreamInfer"
                    )
                answer = response
        if answer is None:
            return pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        return answer

    async def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        async with aclosing(self._answers(request)) as answers:
            async for response, last in answers:
                # A function returns one response; whether it has returned by now depends on thread timing.
                response.parameters[FINAL].bool_param = last or not self._code.streams
                yield response

    async def warm_up(self) -> None:
        """Does nothing: valid inputs are unknown; the file's `load` may test the model."""

    async def died(self) -> None:
        await self.thread.died()
        for channel in self._open:
            channel.end(HopBrokenError("the engine died"))
        raise EngineDeadError(f"the thread of model {self.name} died")

    def close(self) -> None:
        self.thread.stop(self._code.unload)
        self._code.forget()

    async def _answers(self, request: pb.ModelInferRequest) -> AsyncGenerator[tuple[pb.ModelInferResponse, bool], None]:
        """Yields each response and whether it is known to be the last; closing this generator stops the code."""
        submitted_at = time.monotonic()
        await self._admission.enter(self.statistics.retry_after_ms)
        started_at = time.monotonic()
        mailbox = self._mailbox = self._mailbox or Mailbox(asyncio.get_running_loop())
        channel: Channel[pb.ModelInferResponse] = Channel(_UNREAD_RESPONSES, mailbox, self.thread.mailbox)

        def ended(outcome: Outcome | None) -> None:
            if outcome is None:
                channel.end(NotReadyError("the model is stopping"))
            mailbox.post(partial(self._count, outcome or "cancelled", submitted_at, started_at))

        try:
            cancel = self.thread.start(partial(self._run, request, channel), ended)
        except HeadraceError:
            self._admission.leave()
            raise
        self._open.add(channel)
        try:
            while (answer := await channel.get()) is not None:
                yield answer
        finally:
            self._open.discard(channel)
            channel.leave()
            cancel()

    def _count(self, outcome: Outcome, submitted_at: float, started_at: float) -> None:
        """Counts a request whose code has ended; runs on the event loop."""
        self._admission.leave()
        self.statistics.steps += 1
        self.statistics.add(outcome, submitted_at, started_at, time.monotonic())

    async def _run(self, message: pb.ModelInferRequest, channel: Channel[pb.ModelInferResponse]) -> Outcome:
        """Runs one request on the model's thread. Raises only CancelledError, for any error of the code."""
        try:
            request = Request(message)
            if self._code.inputs is not None:
                check_inputs(request.raw, self._code.inputs)
            await self._execute(request, message, channel)
        except ReaderLeftError:
            return "cancelled"
        except HeadraceError as error:
            channel.end(error)
        except BadResultError as error:
            logger.error("model %s: request %s: %s", self.name, message.id, error)
            channel.end(RequestFailedError(str(error)))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and (channel.left or self.thread.stopping):
                raise
            # Any exception, even SystemExit: a user's code can end only its own request.
            logger.exception("model %s failed on request %s", self.name, message.id)
            channel.end(RequestFailedError("the model failed on this request"))
        else:
            channel.end()
            return "succeeded"
        return "failed"

    async def _execute(
        self, request: Request, message: pb.ModelInferRequest, channel: Channel[pb.ModelInferResponse]
    ) -> None:
        results = self._code.execute(request)
        if not isinstance(results, AsyncGenerator):
            await channel.put(write_result(message, await results))
            return
        async with aclosing(results):
            async for result in results:
                response = write_result(message, result)
                await channel.put(response, _weight(response))


def _weight(response: pb.ModelInferResponse) -> int:
    """How much of the unread responses one is; the sizes of texts are unknown."""
    is_small = all(
        output.datatype != BYTES and math.prod(output.shape) <= _SMALL_NUMBERS for output in response.outputs
    )
    return 1 if is_small else _LARGE_WEIGHT


async def _load(name: str, folder: Path) -> PythonCode:
    """Imports the file on the model's own thread, because it may create objects that are bound to the loop."""
    code = PythonCode(name, folder)
    await code.load()
    return code
