"""The metrics of one `PayloadTap`: what is recorded, what waits for the logger, and what was dropped.

Gauges `headrace.payload.queued_bytes`, `…spool_bytes` and `…spool_age`, counters `…spooled` and `…dropped`. `…dropped`
has the attribute `headrace.reason`; every reason has a value from the start. The metrics reader's thread collects them.
"""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.metrics import Meter, Observation

from headrace.payload.tap import PayloadTap

REASON = "headrace.reason"


def observe_tap(tap: PayloadTap, meter: Meter | None = None) -> None:
    """Registers the metrics of the process's tap."""
    meter = meter or metrics.get_meter("headrace")
    meter.create_observable_gauge(
        "headrace.payload.queued_bytes",
        [lambda _: [Observation(tap.queued_bytes)]],
        "By",
        "Size of the parts of records that wait in memory for the disk.",
    )
    meter.create_observable_gauge(
        "headrace.payload.spool_bytes",
        [lambda _: [Observation(tap.spooled_bytes)]],
        "By",
        "Size of the records on disk, of this process and of earlier ones.",
    )
    meter.create_observable_gauge(
        "headrace.payload.spool_age",
        [lambda _: [Observation(tap.oldest_s)]],
        "s",
        "Time since the end of the oldest record that the logger has not acknowledged; 0 if there is none.",
    )
    meter.create_observable_counter(
        "headrace.payload.spooled",
        [lambda _: [Observation(tap.spooled)]],
        "{record}",
        "Records that were written to disk from begin to end.",
    )
    meter.create_observable_counter(
        "headrace.payload.dropped",
        [lambda _: [Observation(count, {REASON: reason}) for reason, count in tap.dropped_so_far.items()]],
        "{part}",
        "Parts of records that were dropped; a dropped begin drops its whole record.",
    )
