"""The record of a request whose tensors are not looked at: model, outcome and duration, but no contents.

One helper for every service that answers or forwards tensors. A request that passes two of them is
recorded once: who forwards it says so by the metadata `RECORDED`, which the gateway takes away from what comes
from outside.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.interceptors import Context
from millrace.payload_tap import PayloadTap, Recording
from millrace.telemetry.tracing import current_trace_id

RECORDED = ("x-millrace-recorded", "true")
REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 256


def request_id_of(context: Context, given: str = "") -> str:
    """What a record calls a request: the caller's own id, else the gateway's, else a new one."""
    metadata = dict(context.invocation_metadata() or ())
    return (given or str(metadata.get(REQUEST_ID, "")) or str(uuid.uuid4()))[:MAX_REQUEST_ID]


def is_recorded(context: Context) -> bool:
    """Whether the caller records the request."""
    return RECORDED in tuple(context.invocation_metadata() or ())


@contextmanager
def recorded(
    tap: PayloadTap, *, request_id: str, model: str, protocol: str, timeout_s: float | None
) -> Iterator[Recording]:
    """Records what becomes of the request that the block answers; `timeout_s` is what its deadline has left."""
    begun = time.monotonic()
    with tap.begin(request_id=request_id, model=model, protocol=protocol, trace_id=current_trace_id()) as recording:
        try:
            yield recording
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC cancels a call whose deadline passes; that is not the caller's doing.
            if timeout_s is not None and time.monotonic() - begun >= timeout_s:
                recording.end("DEADLINE_EXCEEDED", "the deadline passed")
            raise
        recording.end("OK")
