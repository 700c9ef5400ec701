"""Opens a link's call: where the predictor serves it at a port of its own, there.

The first message at the predictor's address tells that port. Where it cannot be reached, behind a firewall or a
service that forwards one port only, the first call is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.rpc.http2.streaming_call import CallBrokenError, StreamingCall
from headrace_protos import steps_pb2 as pb

logger = logging.getLogger(__name__)

METHOD = "/headrace.v1.PredictorSteps/Run"


async def open_steps_call(address: str, receive: Callable[[bytes], None], drained: Callable[[], None]) -> StreamingCall:
    """As StreamingCall.open; the wait for a first message is for the caller to limit too."""
    held: list[bytes] = []
    has_arrived = asyncio.Event()
    is_kept = False

    def arrive(message: bytes) -> None:
        if is_kept:
            receive(message)
        else:
            held.append(message)
            has_arrived.set()

    call = await StreamingCall.open(address, METHOD, arrive, drained)
    try:
        call.ended.add_done_callback(lambda _: has_arrived.set())
        await has_arrived.wait()
        if held and (port := pb.Step.FromString(held[0]).port):
            own_address = f"{address.rpartition(':')[0]}:{port}"
            try:
                own = await StreamingCall.open(own_address, METHOD, receive, drained)
            except CallBrokenError as broken:
                logger.warning("the predictor at %s cannot be reached at port %d: %s", address, port, broken)
            else:
                call.close()
                return own
        is_kept = True
        for message in held:
            receive(message)
    except BaseException:
        call.close()
        raise
    return call
