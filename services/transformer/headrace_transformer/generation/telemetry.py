"""Metrics and span attributes of one generation, however many calls to predictors it takes.

Names are OpenTelemetry's for generative AI, measured at the server, with the gateway's protocol as an attribute, so
that gRPC and HTTP can be compared; other names are `headrace.*`. A model that is not served is `_OTHER`: no label is
text of a caller. Prompts and answers are never part of telemetry.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpc import StatusCode
from opentelemetry import trace
from opentelemetry.metrics import Meter

from headrace.deadline import DEADLINE_MARGIN_S
from headrace.errors import HeadraceError
from headrace.rpc.limits.admission import error_of_call
from headrace.rpc.server.call_context import CallContext
from headrace.telemetry.gathered import Gathered, counter, histogram
from headrace.telemetry.identity import MODEL, PROTOCOL
from headrace.telemetry.rpc import OTHER, mark_failure
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.requests import TextRequest

OUTCOME = "headrace.outcome"
_ERROR = "error.type"
_TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105

_REFUSALS = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.UNIMPLEMENTED,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.UNAUTHENTICATED,
    StatusCode.PERMISSION_DENIED,
}
_OUTCOMES = {StatusCode.CANCELLED: "cancelled", StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded"}

# Seconds, and tokens: those of the conventions for generative AI.
_REQUEST_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)


class GenerationTelemetry:
    """The instruments; one for all requests. `is_served(model)`: the model's name may be a label."""

    def __init__(self, is_served: Callable[[str], bool], meter: Meter | None = None) -> None:
        self._is_served = is_served

        def seconds(name: str, description: str, buckets: tuple[float, ...]) -> Gathered:
            return histogram(meter, name, "s", description, buckets)

        self.duration = seconds(
            "gen_ai.server.request.duration", "From a request's arrival to its last token.", _REQUEST_S
        )
        self.first_token = seconds(
            "gen_ai.server.time_to_first_token", "From a request's arrival to its first token.", _FIRST_TOKEN_S
        )
        self.per_token = seconds(
            "gen_ai.server.time_per_output_token", "A stream's mean time for a token after the first.", _TOKEN_S
        )
        self.gap = seconds("headrace.inter_token_latency", "The time before a chunk, for each of its tokens.", _TOKEN_S)
        self.usage = histogram(meter, "gen_ai.client.token.usage", "{token}", "Tokens of prompts and answers.", _TOKENS)
        self.streams = counter(meter, "headrace.streams", "{stream}", "Generations that have ended, by outcome.")
        self.resumed = counter(
            meter, "headrace.stream.resumed", "{resume}", "How often another predictor resumed a stream."
        )
        self.reconnected = counter(
            meter, "headrace.stream.reconnected", "{request}", "Requests for the rest of an answer that broke off."
        )

    @contextmanager
    def observed(self, request: TextRequest) -> "Iterator[ObservedGeneration]":
        """Observes the generation that the block makes: metrics, and attributes of the call's span."""
        observation = ObservedGeneration(self, request, self._is_served(request.model))
        try:
            yield observation
        except (asyncio.CancelledError, GeneratorExit):
            observation.end(_cancelled_with(request.call))
            raise
        except HeadraceError as error:
            observation.end(error.status)
            raise
        except BaseException:
            observation.end(StatusCode.INTERNAL)
            raise
        observation.end(StatusCode.OK)


class ObservedGeneration:
    """The telemetry of one generation; seconds are since the request arrived."""

    def __init__(self, instruments: GenerationTelemetry, request: TextRequest, is_served: bool) -> None:
        self._instruments = instruments
        self._call = request.call
        self._span = trace.get_current_span()
        operation = "chat" if request.messages else "text_completion"
        model = request.model if is_served else OTHER
        self._gap_attributes = {MODEL: model, PROTOCOL: request.call.caller_protocol}
        self._attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            **self._gap_attributes,
        }
        if request.resume is not None:
            instruments.reconnected.record(1, {MODEL: model})
        self._first_s: float | None = None
        self._latest_s = 0.0
        self._prompt_tokens = 0
        self._tokens = 0
        self._finish_reason: str | None = None
        self._ended = False

    def chunk(self, chunk: TextChunk) -> None:
        instruments, tokens = self._instruments, len(chunk.tokens.token_ids)
        if chunk.tokens.resumed:
            self._span.add_event("resume", {"gen_ai.usage.output_tokens": self._tokens})
            instruments.resumed.record(1, {MODEL: self._gap_attributes[MODEL]})
        if tokens:
            if self._first_s is None:
                self._first_s = chunk.elapsed_s
                self._prompt_tokens = len(chunk.origin.prompt_ids)
                instruments.first_token.record(chunk.elapsed_s, self._attributes)
            else:
                instruments.gap.record((chunk.elapsed_s - self._latest_s) / tokens, self._gap_attributes)
            self._latest_s = chunk.elapsed_s
            self._tokens += tokens
        if chunk.end is not None:
            self._finish_reason = chunk.end.reason
            self.end(StatusCode.OK)

    def end(self, status: StatusCode) -> None:
        """Only the first end has an effect: a caller may leave after the last chunk."""
        if self._ended:
            return
        self._ended = True
        instruments, attributes = self._instruments, self._attributes
        failure = {} if status is StatusCode.OK else {_ERROR: status.name}
        instruments.duration.record(self._call.elapsed_s, attributes | failure)
        if self._first_s is not None:
            instruments.usage.record(self._prompt_tokens, attributes | {_TOKEN_TYPE: "input"})
            instruments.usage.record(self._tokens, attributes | {_TOKEN_TYPE: "output"})
            if self._tokens > 1:
                per_token_s = (self._latest_s - self._first_s) / (self._tokens - 1)
                instruments.per_token.record(per_token_s, attributes)
        instruments.streams.record(1, self._gap_attributes | {OUTCOME: _outcome(status)})
        if self._span.is_recording():
            self._describe(status)

    def _describe(self, status: StatusCode) -> None:
        mark_failure(self._span, status)
        self._span.set_attributes(self._attributes)
        self._span.set_attribute("gen_ai.usage.input_tokens", self._prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        if self._finish_reason is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", [self._finish_reason])


def _cancelled_with(call: CallContext) -> StatusCode:
    """The status of a call that is being cancelled: gRPC cancels one whose deadline passes too."""
    if call.deadline.passed(DEADLINE_MARGIN_S):
        return StatusCode.DEADLINE_EXCEEDED
    error = error_of_call()
    return StatusCode.CANCELLED if error is None else error.status


def _outcome(status: StatusCode) -> str:
    if status is StatusCode.OK:
        return "completed"
    return _OUTCOMES.get(status) or ("refused" if status in _REFUSALS else "failed")
