"""Telemetry of a generation: its queue time as a metric, its phases as events of the call's span.

The events are `queued`, `prefill`, `first_token`, `preempted` (each time) and `generation_end`, with the engine's own
times: they are exact even if the reader or the event loop was busy. They are written when the generation ends, with any
outcome; a phase that it never reached has no event, and a request that was refused has none.
"""

import time

from opentelemetry.metrics import Meter
from opentelemetry.trace import Span

from headrace.telemetry.gathered import Gathered, histogram
from headrace_predictor.engine.interface import Chunk, Timeline

_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
_PREEMPTIONS = "headrace.preemptions"
_QUEUE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)  # Seconds.


def queue_durations(meter: Meter | None) -> Gathered:
    description = "From a sequence's submission until the first step that computes it."
    return histogram(meter, "headrace.queue.duration", "s", description, _QUEUE_BUCKETS)


class ObservedGeneration:
    """One generation until its `end` is called; belongs to the task that reads it. Its events go to the span."""

    def __init__(self, queue_duration: Gathered, attributes: dict[str, str], timeline: Timeline, span: Span) -> None:
        self._timeline = timeline
        self._queue_duration = queue_duration
        self._attributes = attributes
        self._span = span
        self._tokens = 0
        self._queue_is_reported = False

    def take(self, chunk: Chunk) -> Chunk:
        """Observes a chunk that was read, and returns it."""
        self.add(len(chunk.output_ids))
        return chunk

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        self._record_queue_time()

    def end(self) -> None:
        """Writes the events; called once."""
        self._record_queue_time()
        span, timeline = self._span, self._timeline
        if not span.is_recording() or not timeline.submitted:
            return
        span.set_attributes(self._attributes)
        # Engines use the monotonic clock, spans the wall clock.
        now_ns, now = time.time_ns(), time.monotonic()
        ended = now if timeline.ended is None else timeline.ended
        marks = [("queued", timeline.submitted), ("prefill", timeline.started), ("first_token", timeline.first_token)]
        marks += [("preempted", at) for at in timeline.preempted]
        # After a cancellation the sequence may run for one more step: times after its end do not belong to it.
        came = sorted((at, name) for name, at in marks if at is not None and at <= ended)
        for at, name in came:
            span.add_event(name, timestamp=now_ns - int((now - at) * 1e9))
        # Only the engine knows the number of tokens of a sequence that a transformer cancelled.
        attributes: dict[str, int] = {_OUTPUT_TOKENS: self._tokens} if self._tokens or not timeline.first_token else {}
        if timeline.preemptions:
            attributes[_PREEMPTIONS] = timeline.preemptions
        span.add_event("generation_end", attributes, now_ns - int((now - ended) * 1e9))

    def _record_queue_time(self) -> None:
        started = self._timeline.started
        if started is not None and not self._queue_is_reported:
            self._queue_is_reported = True
            self._queue_duration.record(started - self._timeline.submitted, self._attributes)
