"""Request statistics of a model as ModelStatistics reports them, counted where requests arrive.

Every request counts once: as success, as failure (also if it was refused or its deadline passed), or as cancelled.
Requests of a batch count individually in `inferences`. Responses are counted by index: the first ones individually, all
later ones together under LATER, which bounds the size of the report. Durations are nanoseconds: a request's begins at
its arrival, a response's at the previous response; the first response's includes the time in the queue.

Owned by the event loop. Source of the definitions: Triton's statistics extension.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from headrace.deadline import DEADLINE_MARGIN_S, Deadline
from headrace.oip.stream_infer import FINAL, wants_empty_final
from headrace_protos import inference_pb2 as pb

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
