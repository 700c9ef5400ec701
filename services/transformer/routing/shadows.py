"""Shadow copies of requests: another model answers them, and the answers are recorded and not returned.

A copy starts at the first output of its request. It has its own trace, linked to the request's, counts towards no
client's limits, and has the lowest share of a busy engine. At most `_MOST_AT_ONCE` copies run; further ones are dropped
and counted.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry import metrics, trace

from headrace.clients import POLICY
from headrace.deadline import Deadline
from headrace.errors import HeadraceError
from headrace.rpc.call_context import FIRST_TOKEN_TIMEOUT_MS, CallContext, Routed, ServedModel
from headrace.telemetry.identity import MODEL, begin_request, current_request_id

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_LONGEST_S = 60.0
_OUTCOME = "headrace.outcome"


def copied_call(call: CallContext, served: ServedModel, record_id: str) -> CallContext:
    """The call of a copy: its client's, without the client's limits and deadlines."""
    left_out = (POLICY, FIRST_TOKEN_TIMEOUT_MS)
    return replace(
        call,
        metadata=tuple(item for item in call.metadata if item[0] not in left_out),
        deadline=Deadline.after(_LONGEST_S),
        arrived=time.monotonic(),
        routed={served.model: Routed(served)},
        shadow_of=record_id,
    )


class Shadows:
    """Owned by the event loop. Copies are made while `run` runs."""

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._running = 0
        self._copies = metrics.get_meter("headrace").create_counter(
            "headrace.shadows", "{request}", "Copies of requests for another model, by outcome."
        )

    async def run(self) -> None:
        """Owns the copies, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None

    def start(self, served: ServedModel, answer: Callable[[], AsyncGenerator[Any, None]]) -> None:
        """Reads the answer of a copy to its end, in a task of its own."""
        if self._tasks is None or self._running >= _MOST_AT_ONCE:
            self._copies.add(1, {MODEL: served.model, _OUTCOME: "dropped"})
            return
        self._running += 1
        link = trace.Link(trace.get_current_span().get_span_context())
        # In a context of its own: nothing of the request's call is to reach it.
        self._tasks.create_task(
            self._run(served, answer, current_request_id(), link), name="shadow", context=contextvars.Context()
        )

    async def _run(
        self, served: ServedModel, answer: Callable[[], AsyncGenerator[Any, None]], request_id: str, link: trace.Link
    ) -> None:
        begin_request(request_id)
        outcome = "failed"
        attributes = {"gen_ai.request.model": served.model}
        try:
            tracer = trace.get_tracer("headrace")
            with tracer.start_as_current_span("shadow", attributes=attributes, links=[link]):
                async with aclosing(answer()) as chunks:
                    async for _ in chunks:
                        pass
            outcome = "completed"
        except HeadraceError:
            pass  # Its record has the error.
        except Exception:
            logger.exception("a copy of a request for %s failed", served)
        finally:
            self._running -= 1
            self._copies.add(1, {MODEL: served.model, _OUTCOME: outcome})
