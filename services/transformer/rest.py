"""REST bodies that the gateway passes through as they are, and errors in them.

An error before the first body travels as initial metadata (`x-http-status`, `x-failed-hop`), from
which the gateway sets the HTTP status, and a body in the API's own shape. After the first body the
status is gone: the error is one more server-sent event.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from google.api.httpbody_pb2 import HttpBody

from millrace.errors import MillraceError, RequestFailedError
from millrace.interceptors import Context

logger = logging.getLogger(__name__)

JSON = "application/json"
EVENTS = "text/event-stream"
_HOP = "transformer"

Handler = Callable[[Any, Any, Context], AsyncGenerator[HttpBody, None]]


def json_body(value: Any) -> HttpBody:
    return HttpBody(content_type=JSON, data=orjson.dumps(value))


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def rest_errors(shape: Callable[[MillraceError], dict[str, Any]]) -> Callable[[Handler], Handler]:
    """Gives a handler's errors the body that `shape` makes of them."""

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def handle(self: Any, request: Any, context: Context) -> AsyncGenerator[HttpBody, None]:
            begun = False
            try:
                async with aclosing(handler(self, request, context)) as bodies:
                    async for body in bodies:
                        begun = True
                        yield body
                return
            except MillraceError as raised:
                error = raised
            except Exception:
                logger.exception("%s failed", handler.__qualname__)
                error = RequestFailedError("internal error")
            if begun:
                yield HttpBody(data=event(shape(error)))
            else:
                await context.send_initial_metadata(error.trailing_metadata(_HOP))
                yield json_body(shape(error))
            # The body is out; the call itself ends as what it is, for gRPC callers and for the trace.
            raise error

        return handle

    return decorate
