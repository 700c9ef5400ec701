"""What records say of the call that a request came by, and the records of requests for tensors.

One helper for every service that answers or forwards tensors. Tensors are kept by name, shape and digest, see
payload/tensors.py. A request that passes two services is recorded once: who forwards it says so by the
metadata `RECORDED`, which the gateway takes away from what comes from outside.

`CALL_ID` and `CLIENT` are the gateway's word: it overwrites or removes them whatever a caller sent. Of the
caller's own metadata a record has what the rules allow.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.payload.tap import PayloadTap, Recording, Tensors
from millrace.rpc.admission import error_of_call
from millrace.rpc.handlers import Context
from millrace.telemetry.identity import (
    REQUEST_ID_METADATA,
    current_span_id,
    current_trace_id,
    set_request_id,
)
from millrace.telemetry.rpc import DEADLINE_MARGIN_S

RECORDED = ("x-millrace-recorded", "true")
MAX_REQUEST_ID = 256
CALL_ID = "x-millrace-call-id"
CLIENT = "x-millrace-client"


@dataclass(frozen=True)
class Origin:
    """Where a request came in: the method called, the caller's or the gateway's id for it, and the call's metadata.

    `arrived` is when, of the monotonic clock.
    """

    protocol: str
    request_id: str
    metadata: Sequence[tuple[str, str | bytes]] = ()
    arrived: float = field(default_factory=time.monotonic, compare=False)

    def left_s(self, timeout_s: float | None) -> float | None:
        """What is left now of a time limit that began with the arrival; 0 where it has passed, None for none."""
        return None if timeout_s is None else max(0.0, timeout_s - self.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        """Since the arrival."""
        return time.monotonic() - self.arrived

    def told(self, name: str) -> str:
        """What the metadata says by a name, several values joined by commas as HTTP has it; "" for nothing."""
        return ", ".join(value for key, value in self.metadata if key == name and isinstance(value, str))


def origin_of(context: Context, protocol: str, given: str = "") -> Origin:
    """Of a call; the request's id is the caller's own, else the gateway's, else a new one. Spans and log lines of the
    task name it from now on."""
    metadata = tuple(context.invocation_metadata() or ())
    request_id = given or Origin("", "", metadata).told(REQUEST_ID_METADATA) or str(uuid.uuid4())
    request_id = request_id[:MAX_REQUEST_ID]
    set_request_id(request_id)
    return Origin(protocol, request_id, metadata)


def is_recorded(context: Context) -> bool:
    """Whether the caller records the request."""
    return RECORDED in tuple(context.invocation_metadata() or ())


def begin(
    tap: PayloadTap, origin: Origin, model: str, *, prompt: str = "", parameters: str = "", inputs: Tensors = ()
) -> Recording:
    """Opens the recording of a request that arrived now, inside the span of its call."""
    told = {name: origin.told(name) for name in tap.rules.metadata}
    return tap.begin(
        request_id=origin.request_id,
        model=model,
        protocol=origin.protocol,
        prompt=prompt,
        parameters=parameters,
        trace_id=current_trace_id(),
        span_id=current_span_id(),
        metadata={name: value for name, value in told.items() if value},
        client=origin.told(CLIENT),
        call_id=origin.told(CALL_ID),
        inputs=inputs,
    )


def deadline_passed(begun: float, timeout_s: float | None) -> bool:
    """Whether a request, cancelled now, was so for its deadline: gRPC does that, and it is not the caller's doing.

    `begun` is of the monotonic clock.
    """
    return timeout_s is not None and time.monotonic() - begun >= timeout_s - DEADLINE_MARGIN_S


def end_cancelled(recording: Recording, begun: float, timeout_s: float | None) -> None:
    """Ends the record of a request that is being cancelled with what its caller reads, where that is no cancel."""
    if deadline_passed(begun, timeout_s):
        recording.end("DEADLINE_EXCEEDED", "the deadline passed")
    elif (error := error_of_call()) is not None:
        recording.end_with(error)


@contextmanager
def recorded(
    tap: PayloadTap,
    origin: Origin,
    model: str,
    timeout_s: float | None,
    *,
    prompt: str = "",
    parameters: str = "",
    inputs: Tensors = (),
) -> Iterator[Recording]:
    """Records what becomes of the request that the block answers; `timeout_s` is what its deadline has left."""
    begun = time.monotonic()
    with begin(tap, origin, model, prompt=prompt, parameters=parameters, inputs=inputs) as recording:
        try:
            yield recording
        except (asyncio.CancelledError, GeneratorExit):
            end_cancelled(recording, begun, timeout_s)
            raise
        recording.end("OK")
