"""The record of one call: begins with the call's attributes, ends with its status.

Every service that answers or forwards requests uses it. A request that passes two services is recorded once: the
service that forwards it sends the metadata `RECORDED`, which the gateway removes from requests that come from outside.
A record holds the caller's own metadata only as far as the rules allow.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.clients import CLIENT
from headrace.deadline import DEADLINE_MARGIN_S, PASSED
from headrace.payload.parts import Begin, Tensors
from headrace.payload.recording import Recording
from headrace.payload.tap import PayloadTap
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata, error_of_call
from headrace.rpc.server.call_context import CALL_ID, CallContext
from headrace.telemetry.identity import span_id_of, trace_id_of

RECORDED = ("x-headrace-recorded", "true")
DIRECT = ("x-headrace-direct", "true")  # The gateway's mark, which it removes from requests that come from outside.


def is_recorded(context: Context) -> bool:
    """Whether the caller records the request."""
    return RECORDED in call_metadata(context)


def is_direct(context: Context) -> bool:
    """Whether the gateway has sent the request directly to this service."""
    return DIRECT in call_metadata(context)


def begin(
    tap: PayloadTap, call: CallContext, model: str, *, prompt: str = "", parameters: str = "", inputs: Tensors = ()
) -> Recording:
    """Opens the recording of a request that arrived now, inside the span of its call."""
    headers = {name: call.header(name) for name in tap.rules.metadata}
    request = Begin(
        request_id=call.request_id,
        model=model,
        protocol=call.protocol,
        prompt=prompt,
        parameters=parameters,
        trace_id=trace_id_of(),
        span_id=span_id_of(),
        client=call.header(CLIENT),
        call_id=call.header(CALL_ID),
        metadata={name: value for name, value in headers.items() if value},
    )
    return tap.begin(request, inputs)


@contextmanager
def recorded(
    tap: PayloadTap, call: CallContext, model: str, *, prompt: str = "", parameters: str = "", inputs: Tensors = ()
) -> Iterator[Recording]:
    """Records the request that the `with` block answers, and its end."""
    with begin(tap, call, model, prompt=prompt, parameters=parameters, inputs=inputs) as recording:
        try:
            yield recording
        except (asyncio.CancelledError, GeneratorExit):
            # The status that the caller gets: gRPC also cancels a call whose deadline passes.
            if call.deadline.passed(DEADLINE_MARGIN_S):
                recording.end("DEADLINE_EXCEEDED", PASSED)
            elif (error := error_of_call()) is not None:
                recording.end_with(error)
            raise
        recording.end("OK")
