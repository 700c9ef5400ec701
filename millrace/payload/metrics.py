"""What the payload log has taken, what waits for the logger, and what was lost: the metrics of one `PayloadTap`.

Gauges `millrace.payload.queued_bytes`, `…spool_bytes` and `…spool_age`, counters `…spooled` and `…dropped`, the latter
by `millrace.reason`, each reason from the start on. They are collected on the metrics reader's thread.
"""

from __future__ import annotations

from opentelemetry import metrics
from opentelemetry.metrics import Meter, Observation

from millrace.payload.tap import PayloadTap

REASON = "millrace.reason"


def observe_tap(tap: PayloadTap, meter: Meter | None = None) -> None:
    """Shows a tap, of which there is one a process."""
    meter = meter or metrics.get_meter("millrace")
    meter.create_observable_gauge(
        "millrace.payload.queued_bytes",
        [lambda _: [Observation(tap.queued_bytes)]],
        "By",
        "What of records waits in memory for the disk.",
    )
    meter.create_observable_gauge(
        "millrace.payload.spool_bytes",
        [lambda _: [Observation(tap.spooled_bytes)]],
        "By",
        "What of records lies on disk: of this process and of those before it.",
    )
    meter.create_observable_gauge(
        "millrace.payload.spool_age",
        [lambda _: [Observation(tap.oldest_s)]],
        "s",
        "How long ago the oldest record ended that the logger has not acknowledged; 0: there is none.",
    )
    meter.create_observable_counter(
        "millrace.payload.spooled",
        [lambda _: [Observation(tap.spooled)]],
        "{record}",
        "Records that were written to disk whole.",
    )
    meter.create_observable_counter(
        "millrace.payload.dropped",
        [lambda _: [Observation(count, {REASON: reason}) for reason, count in tap.dropped_so_far.items()]],
        "{part}",
        "Parts of records that were given up, or with its begin a whole record.",
    )
