"""The lag of the event loop, which delays every stream of a process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

_EVERY_S = 0.1
_LOOKS = 100  # Ten seconds: longer than most pages' scrape interval, so that no delay falls between two scrapes.


async def watch_loop_lag(meter: Meter | None = None) -> None:
    """Measures, until cancelled, how late the loop wakes a task."""
    latest: deque[float] = deque(maxlen=_LOOKS)

    def longest(_: CallbackOptions) -> Iterable[Observation]:
        # A copy, because the loop runs meanwhile.
        return [Observation(max(tuple(latest), default=0.0))]

    (meter or metrics.get_meter("headrace")).create_observable_gauge(
        "headrace.event_loop.lag", [longest], "s", "The longest delay of the event loop in the last ten seconds."
    )
    while True:
        before = time.monotonic()
        await asyncio.sleep(_EVERY_S)
        latest.append(max(0.0, time.monotonic() - before - _EVERY_S))
