"""A loaded model while it is served: counts its requests, and ends them when the model is unloaded.

Owned by the event loop. `drain` waits for the requests in flight and, after its timeout, hands back those that can
resume elsewhere. `stop` closes the model; requests that are then still in flight end with NotReadyError, even if the
model's own code does not return.

Every request counts once in ModelStatistics: as success, as failure (also if it was refused or its deadline passed), or
as cancelled. Requests of a batch count individually in `inferences`. Responses are counted by index: the first ones
individually, all later ones together under LATER, which bounds the size of the report. Durations are nanoseconds: a
request's begins at its arrival, a response's at the previous response; the first response's includes the time in the
queue. Source of the definitions: Triton's statistics extension.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from headrace.deadline import DEADLINE_MARGIN_S, Deadline
from headrace.errors import NotReadyError, OtherWeightsError
from headrace.oip.model_description import FINGERPRINT, check_requested_outputs
from headrace.oip.stream_infer import FINAL, wants_empty_final
from headrace_predictor.models.served_model import ANY_CALLER, VERSION, Caller, Responses, ServedModel
from headrace_protos import inference_pb2 as pb

T = TypeVar("T")

_INDEXES = 16
LATER = f"{_INDEXES}+"


class RequestStatistics:
    """See the module. `max_batch_size` is the model's, 0 if its tensors have no batch dimension."""

    def __init__(self, max_batch_size: int = 0) -> None:
        self.success = pb.StatisticDuration()
        self.fail = pb.StatisticDuration()
        self.inferences = 0
        self.last_inference_ms = 0
        self.responses: dict[str, pb.InferResponseStatistics] = {}
        self._batches = max_batch_size > 0

    def begin(self, request: pb.ModelInferRequest, deadline: Deadline) -> "CountedRequest":
        """Counts the request that the block handles."""
        shape = list(request.inputs[0].shape) if self._batches and request.inputs else []
        return CountedRequest(self, shape[0] if len(shape) > 1 else 1, deadline, wants_empty_final(request))

    def at(self, index: int) -> pb.InferResponseStatistics:
        """The outcomes of the responses at an index; a response without outputs is empty."""
        name = str(index) if index < _INDEXES else LATER
        if name not in self.responses:
            fields = pb.InferResponseStatistics.DESCRIPTOR.fields
            self.responses[name] = pb.InferResponseStatistics(**{each.name: pb.StatisticDuration() for each in fields})
        return self.responses[name]


class CountedRequest:
    """A context manager around one request; the caller reports each response to it."""

    def __init__(self, statistics: RequestStatistics, batch: int, deadline: Deadline, empty_final: bool) -> None:
        self._statistics = statistics
        self._batch = batch
        self._deadline = deadline
        self._empty_final = empty_final  # The front end ends the stream with one more response.
        self._started = self._last = time.monotonic_ns()
        self._responses = 0
        self._complete = False

    def response(self, response: pb.ModelInferResponse) -> None:
        tally, lap_ns = self._tally(), self._lap()
        if response.outputs:
            _add(tally.success, lap_ns)
            _add(tally.compute_infer, lap_ns)
            _add(tally.compute_output, 0)  # Included in compute_infer.
        else:
            _add(tally.empty_response, lap_ns)
        self._responses += 1
        self._complete = FINAL in response.parameters and response.parameters[FINAL].bool_param

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        statistics = self._statistics
        duration_ns = time.monotonic_ns() - self._started
        statistics.last_inference_ms = int(time.time() * 1000)
        # A reader may stop after the last response without waiting for the end of the stream.
        left = isinstance(error, asyncio.CancelledError | GeneratorExit) and not self._complete
        if left and not self._deadline.passed(DEADLINE_MARGIN_S):
            _add(self._tally().cancel, self._lap())
        elif left or isinstance(error, Exception):
            _add(self._tally().fail, self._lap())
            _add(statistics.fail, duration_ns)
        else:
            if self._empty_final:
                _add(self._tally().empty_response, self._lap())
            _add(statistics.success, duration_ns)
            statistics.inferences += self._batch

    def _tally(self) -> pb.InferResponseStatistics:
        return self._statistics.at(self._responses)

    def _lap(self) -> int:
        now = time.monotonic_ns()
        lap, self._last = now - self._last, now
        return lap


def _add(tally: pb.StatisticDuration, ns: int) -> None:
    tally.count += 1
    tally.ns += ns


class Serving:
    """See the module. Created after the model's warm-up, whose counts are excluded."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.requests = RequestStatistics(model.description.max_batch_size)
        counted = model.statistics
        self._before = (counted.steps, counted.ended, counted.queue_ns, counted.compute_ns)
        self.request_ids: list[str] = []  # Ids of the requests in flight, as their callers sent them.
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = False
        self._waiting: set[asyncio.Task[Any]] = set()
        # Of the weights that answer; "" if they have none.
        self.fingerprint = model.description.parameters.get(FINGERPRINT, "")

    async def infer(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> pb.ModelInferResponse:
        with self._counted(request, caller.deadline) as counted:
            check_requested_outputs(request)
            response = await self._until_stopped(self.model.infer, request, caller)
            self._sign(response)
            counted.response(response)
            return response

    async def stream(self, request: pb.ModelInferRequest, caller: Caller = ANY_CALLER) -> Responses:
        is_first = True
        with self._counted(request, caller.deadline) as counted:
            check_requested_outputs(request)
            async with aclosing(self.model.stream(request, caller)) as responses:
                while True:
                    response = await self._until_stopped(anext, responses, None)
                    if response is None:
                        return
                    if is_first:
                        is_first = False
                        self._sign(response)
                    counted.response(response)
                    yield response

    def sequence(self, request_id: str, deadline: Deadline, fingerprint: str) -> AbstractContextManager[CountedRequest]:
        """Counts a sequence that the block generates by itself.

        `fingerprint` is that of the weights that it needs ("": any); raises OtherWeightsError.
        """
        if fingerprint and fingerprint != self.fingerprint:
            raise OtherWeightsError(f"model {self.model.name!r} has other weights here")
        return self._counted(pb.ModelInferRequest(id=request_id), deadline)

    async def drain(self, timeout_s: float) -> int:
        """Waits until no request is in flight, or for the timeout, then hands back; returns how many are left."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.model.hand_back()
        return self._in_flight

    async def stop(self) -> None:
        """Closes the model, which takes seconds at most, and ends the requests in flight."""
        await asyncio.to_thread(_close, [self.model])
        self._stopped = True
        waiting, self._waiting = self._waiting, set()
        for task in waiting:
            task.cancel()

    def statistics(self) -> pb.ModelStatistics:
        """The model's row of ModelStatistics."""
        counted = self.model.statistics
        steps, ended, queue_ns, compute_ns = self._before
        ended = counted.ended - ended
        duration = pb.StatisticDuration
        # compute_infer includes the conversion of inputs and outputs. Clients require the same count in all three.
        converted = duration(count=ended)
        return pb.ModelStatistics(
            name=self.model.name,
            version=VERSION,
            last_inference=self.requests.last_inference_ms,
            inference_count=self.requests.inferences,
            execution_count=counted.steps - steps,
            inference_stats=pb.InferStatistics(
                success=self.requests.success,
                fail=self.requests.fail,
                queue=duration(count=ended, ns=counted.queue_ns - queue_ns),
                compute_input=converted,
                compute_infer=duration(count=ended, ns=counted.compute_ns - compute_ns),
                compute_output=converted,
            ),
            response_stats=self.requests.responses,
        )

    def _sign(self, response: pb.ModelInferResponse) -> None:
        """Adds the fingerprint of the weights that answer the call."""
        if self.fingerprint:
            response.parameters[FINGERPRINT].string_param = self.fingerprint

    @contextmanager
    def _counted(self, request: pb.ModelInferRequest, deadline: Deadline) -> Iterator[CountedRequest]:
        self.request_ids.append(request.id)
        self._in_flight += 1
        self._idle.clear()
        try:
            with self.requests.begin(request, deadline) as counted:
                yield counted
        finally:
            self.request_ids.remove(request.id)
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _until_stopped(self, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """What a call of the model returns; raises NotReadyError once the model is stopped."""
        unloaded = f"model {self.model.name!r} was unloaded"
        task = asyncio.current_task()
        if self._stopped or task is None:
            raise NotReadyError(unloaded)
        cancelled_before = task.cancelling()
        self._waiting.add(task)
        try:
            return await call(*arguments)
        except asyncio.CancelledError:
            # As asyncio.timeout does, which takes longer: a cancellation by others remains one.
            if task not in self._waiting and task.uncancel() <= cancelled_before:
                raise NotReadyError(unloaded) from None
            raise
        finally:
            self._waiting.discard(task)


def _close(models: list[ServedModel]) -> None:
    """Closes the only element and empties the list.

    A pool thread keeps its arguments for a moment: they must not keep the model, whose memory is about to be released.
    """
    models.pop().close()
