"""Errors in the streams that the gateway transcodes, message by message, into lines of JSON.

A REST client sees no trailers: after the first message, a failed call looks to it like a complete one. `errors_in_band`
therefore gives callers by REST one more message, of which only the field `error` is set. The call itself ends with its
status all the same, for the trace and the access log. gRPC callers get only the status.
"""

import functools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.rpc import Context
from headrace.telemetry.identity import protocol_of

ResponseT = TypeVar("ResponseT")
Handler = Callable[[Any, Any, Context], AsyncGenerator[ResponseT, None]]


def errors_in_band(
    response_type: Callable[..., ResponseT], *, headers_are_out: bool = False
) -> Callable[[Handler[ResponseT]], Handler[ResponseT]]:
    """Gives a streaming handler a last `response_type(error=…)` where it fails after its first response or headers."""

    def decorate(handler: Handler[ResponseT]) -> Handler[ResponseT]:
        @functools.wraps(handler)
        async def handle(self: Any, request: Any, context: Context) -> AsyncGenerator[ResponseT, None]:
            begun = headers_are_out
            async with aclosing(handler(self, request, context)) as responses:
                try:
                    async for response in responses:
                        begun = True
                        yield response
                except Exception as error:
                    if begun and protocol_of(tuple(context.invocation_metadata() or ())) == "http":
                        yield response_type(
                            error=error.message if isinstance(error, HeadraceError) else "internal error"
                        )
                    raise

        return handle

    return decorate
