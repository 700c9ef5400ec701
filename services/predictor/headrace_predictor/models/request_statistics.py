"""Request statistics of a model as ModelStatistics reports them, counted where requests arrive.

Every request counts once: as success, as failure (also if it was refused or its deadline passed), or as cancelled.
Requests of a batch count individually in `inferences`. Responses are counted by index: the first ones individually, all
later ones together under LATER, which bounds the size of the report. Durations are nanoseconds: a request's begins at
its arrival, a response's at the previous response; the first response's includes the time in the queue.

Owned by the event loop. Source of the definitions: Triton's statistics extension.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from headrace.deadline import DEADLINE_MARGIN_S, Deadline
from headrace.oip.stream_infer import FINAL, wants_empty_final
from headrace_protos import inference_pb2 as pb

_INDEXES = 16
LATER = f"{_INDEXES}+"


@dataclass
class Tally:
    """A number of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def as_message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass
class ResponseTally:
    """Outcomes of the responses at one index; a response without outputs is empty."""

    success: Tally = field(default_factory=Tally)
    empty: Tally = field(default_factory=Tally)
    fail: Tally = field(default_factory=Tally)
    cancel: Tally = field(default_factory=Tally)

    def as_message(self) -> pb.InferResponseStatistics:
        return pb.InferResponseStatistics(
            compute_infer=self.success.as_message(),
            compute_output=pb.StatisticDuration(count=self.success.count),  # Included in compute_infer.
            success=self.success.as_message(),
            empty_response=self.empty.as_message(),
            fail=self.fail.as_message(),
            cancel=self.cancel.as_message(),
        )


class RequestStatistics:
    """See the module. `max_batch_size` is the model's, 0 if its tensors have no batch dimension."""

    def __init__(self, max_batch_size: int = 0) -> None:
        self.success = Tally()
        self.fail = Tally()
        self.inferences = 0
        self.last_inference_ms = 0
        self.responses: dict[str, ResponseTally] = {}
        self._batches = max_batch_size > 0

    def begin(self, request: pb.ModelInferRequest, deadline: Deadline) -> CountedRequest:
        """Counts the request that the block handles."""
        shape = list(request.inputs[0].shape) if self._batches and request.inputs else []
        return CountedRequest(self, shape[0] if len(shape) > 1 else 1, deadline, wants_empty_final(request))

    def at(self, index: int) -> ResponseTally:
        """The tally of the responses at an index."""
        return self.responses.setdefault(str(index) if index < _INDEXES else LATER, ResponseTally())


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
        tally = self._tally()
        (tally.success if response.outputs else tally.empty).add(self._lap())
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
            self._tally().cancel.add(self._lap())
        elif left or isinstance(error, Exception):
            self._tally().fail.add(self._lap())
            statistics.fail.add(duration_ns)
        else:
            if self._empty_final:
                self._tally().empty.add(self._lap())
            statistics.success.add(duration_ns)
            statistics.inferences += self._batch

    def _tally(self) -> ResponseTally:
        return self._statistics.at(self._responses)

    def _lap(self) -> int:
        now = time.monotonic_ns()
        lap, self._last = now - self._last, now
        return lap
