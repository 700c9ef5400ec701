"""One sequence of a transformer's session, from its submission to its end, with the telemetry of a separate call.

It is counted as a request of its model, and has the predictor's span, a duration and a log line. Owned by the event
loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from grpc import StatusCode
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from headrace.deadline import DEADLINE_MARGIN_S, Deadline
from headrace.errors import HeadraceError
from headrace.oip.stream_infer import FINAL
from headrace.telemetry.identity import PROTOCOL, REQUEST_ID, context_of, links_to, traceparent_of
from headrace.telemetry.rpc import attributes_of, duration_histogram, end_span, log_call
from headrace_predictor.engine.interface import Timeline
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.repository.lease import CountedRequest, Serving
from headrace_predictor.telemetry import ObservedGeneration
from headrace_protos import inference_pb2, steps_pb2

_ATTRIBUTES = attributes_of("headrace.v1.PredictorSteps/Run") | {PROTOCOL: "grpc"}
_LAST = inference_pb2.ModelInferResponse(outputs=[inference_pb2.ModelInferResponse.InferOutputTensor()])
_LAST.parameters[FINAL].bool_param = True


class SequenceTelemetry:
    """The tracer and the histogram of sequences' spans and durations; one object for each session."""

    def __init__(self) -> None:
        self.tracer = trace.get_tracer("headrace")
        self.duration = duration_histogram(None, "rpc.server.call.duration")


class StepsSequence:
    """A sequence from its arrival on, which `end` or `cancel` ends, also one that is refused."""

    def __init__(self, message: steps_pb2.Submission, telemetry: SequenceTelemetry) -> None:
        self.timeline = Timeline()
        self.deadline = Deadline.after(message.timeout_s if message.HasField("timeout_s") else None)
        self._message = message
        self._duration = telemetry.duration
        self._began = time.monotonic()
        self._span: Span = trace.INVALID_SPAN
        self._lease = ExitStack()
        self._counted: CountedRequest | None = None
        self._observed: ObservedGeneration | None = None
        if message.traceparent:
            attributes = _ATTRIBUTES | {REQUEST_ID: message.request_id}
            links = links_to(message.follows) if message.follows else ()
            name = _ATTRIBUTES["rpc.method"]
            self._span = telemetry.tracer.start_span(
                name, context_of(message.traceparent), SpanKind.SERVER, attributes, links
            )

    @property
    def traceparent(self) -> str:
        """The span as a traceparent; "" without one."""
        return traceparent_of(self._span) if self._span is not trace.INVALID_SPAN else ""

    def lease(self, serving: Serving) -> None:
        """Counts the sequence as a request of the model until its end; raises OtherWeightsError."""
        counted = serving.sequence(self._message.request_id, self.deadline, self._message.fingerprint)
        self._counted = self._lease.enter_context(counted)

    def begin(self, model: GenerationModel, hand_back: Callable[[HeadraceError], None]) -> None:
        """The engine has the sequence from now on; `hand_back` takes the error with which the predictor ends it."""
        self._observed = model.observe(self.timeline, self._span)
        model.resumable.add(hand_back)
        self._lease.callback(model.resumable.discard, hand_back)

    def cancel(self) -> None:
        """The caller has cancelled the sequence, or its deadline has passed."""
        is_late = self.deadline.passed(DEADLINE_MARGIN_S)
        self._end(asyncio.CancelledError(), StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED)

    def end(self, error: HeadraceError | None, tokens: int = 0) -> None:
        """The sequence has ended after `tokens` tokens."""
        if self._observed is not None:
            self._observed.add(tokens)
        self._end(error, StatusCode.OK if error is None else error.status)

    def _end(self, error: BaseException | None, code: StatusCode) -> None:
        """Called once."""
        if self._observed is not None:
            self._observed.end()
        if error is None and self._counted is not None:
            self._counted.response(_LAST)
        self._lease.__exit__(type(error) if error is not None else None, error, None)
        duration_s = time.monotonic() - self._began
        end_span(self._span, code, is_server=True, streams=True)
        self._duration.record(duration_s, _ATTRIBUTES | {"rpc.response.status_code": code.name})
        log_call(logging.INFO, _ATTRIBUTES, code, duration_s, self._message.request_id, self._span)
