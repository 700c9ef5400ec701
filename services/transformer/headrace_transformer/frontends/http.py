"""REST bodies that the gateway passes through as they are, and errors in them.

An error before the first body is sent as initial metadata (`x-http-status`, `x-failed-hop`), from which the gateway or
the HTTP server (headrace/rpc/http2) sets the HTTP status, and a body in the API's own shape. After the first body the
status has been sent: the error is one more server-sent event.

An answer by events begins with `Events`, which is not sent: from then on silence is filled with comments, which clients
ignore and which keep proxies from closing the connection.

The methods of OpenAI's API, and of others beside it, are served by HTTP: the gateway rewrites each path to the name of
its method (envoy/envoy.yaml), which is in records, spans and metrics.
"""

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from google.api.httpbody_pb2 import HttpBody

from headrace.errors import HeadraceError, InvalidRequestError, RequestFailedError
from headrace.rpc import Context
from headrace.rpc.http2.request import ErrorBody, HttpMethod
from headrace.rpc.limits.admission import ResponseHead, error_of_call, head_of_call
from headrace.rpc.server.call_context import call_context
from headrace_protos import rest_pb2

logger = logging.getLogger(__name__)

JSON = "application/json"
PLAIN = "text/plain"
EVENTS = "text/event-stream"
_HOP = "transformer"

_LINE_ENDS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")  # U+0085, U+2028 and U+2029.
_LAST_COMMENT_S = 1.0
_MAX_DIGITS = 9  # Of a number in a query.
_VERBS = {"Cancel": "POST", "CancelBatch": "POST", "Delete": "DELETE", "DeleteFile": "DELETE"}  # Else POST or GET.
_COMMENT = HttpBody(content_type=EVENTS, data=b": keep-alive\n\n")


@dataclass(frozen=True)
class Events:
    """What an answer begins with that has events.

    After `silent_s` there is a comment, 0: never. `write` makes the event of an error that has its own shape.
    """

    silent_s: float
    write: Callable[[HeadraceError], bytes] | None = None


Body: TypeAlias = "HttpBody | Events"
Bodies: TypeAlias = "AsyncGenerator[Body, None]"
Method = Callable[[Any, Any, Context], AsyncGenerator[HttpBody, None]]
Shape = Callable[[HeadraceError], dict[str, Any]]  # The JSON of an error.


def json_body(value: Any) -> HttpBody:
    return HttpBody(content_type=JSON, data=orjson.dumps(value))


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """How many objects a query wants of a list at most; raises InvalidRequestError."""
    text = query.get("limit", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRequestError("limit must be a whole number", param="limit")
    if int(text) > most:
        raise InvalidRequestError(f"limit must be from 1 to {most}", param="limit")
    return int(text) or default


def newest_first(query: Mapping[str, str]) -> bool:
    """The order that a query wants of a list; raises InvalidRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    return order == "desc"


def page_of(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A part of a list of objects with ids."""
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": has_more}


async def bodies_of(content_type: str, pieces: Iterable[bytes]) -> Bodies:
    """An answer in pieces."""
    for piece in pieces:
        yield HttpBody(content_type=content_type, data=piece)


def one_line(data: bytes) -> bytes:
    """JSON with the characters escaped at which clients that are no browsers split lines too."""
    return _LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), data)


def event_json(value: Any) -> bytes:
    """JSON for an event."""
    return one_line(orjson.dumps(value))


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + event_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event with a name, which is the value's `type`."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + event(value)


def rest_method(shape: Shape) -> Callable[[Callable[[Any, Any, Any], Any]], Method]:
    """Makes a servicer's method of a handler, whose errors get the body that `shape` makes of them.

    The handler takes the request and its CallContext, and either yields the Bodies of the answer or is a coroutine that
    returns these, or the only body. `OpenAIServicer.Models` has the protocol "headrace.rest.v1.OpenAI/Models".
    """

    def decorate(handler: Callable[[Any, Any, Any], Any]) -> Method:
        protocol = f"headrace.rest.v1.{handler.__qualname__.replace('Servicer.', '/')}"

        @functools.wraps(handler)
        async def handle(self: Any, request: Any, context: Context) -> AsyncGenerator[HttpBody, None]:
            begun, comments, head = False, None, head_of_call()
            last: Callable[[HeadraceError], bytes] = lambda error: event(shape(error))  # noqa: E731

            try:
                answer = handler(self, request, call_context(context, protocol))
                if inspect.isawaitable(answer):
                    answer = await answer
                async with aclosing(_only(answer) if isinstance(answer, HttpBody) else answer) as bodies:
                    async for body in bodies:
                        if isinstance(body, Events):
                            comments = _Comments(context, body.silent_s, head) if body.silent_s else None
                            last = body.write or last
                            continue
                        begun = True
                        if comments is not None:
                            comments.silent_since = None
                            await comments.written()
                        yield body
                        if comments is not None:
                            comments.silent_since = asyncio.get_running_loop().time()
                return
            except asyncio.CancelledError:
                ended_with = error_of_call()
                if ended_with is None:
                    raise
                error = ended_with
            except HeadraceError as raised:
                error = raised
            except Exception:
                logger.exception("%s failed", handler.__qualname__)
                error = RequestFailedError("internal error")
            finally:
                if comments is not None:
                    await comments.end()
                    begun = begun or comments.sent
            if begun:
                yield HttpBody(data=last(error))
            else:
                head.add(*error.trailing_metadata(_HOP))
                yield json_body(shape(error))
            # The body was sent; the call still ends with its error, for gRPC callers and for the trace.
            raise error

        return handle

    return decorate


async def _only(body: HttpBody) -> Bodies:
    yield body


def error_body(shape: Shape) -> ErrorBody:
    """What the HTTP server writes for an error before any method's answer."""
    return lambda error: orjson.dumps(shape(error))


def http_methods(service: str, servicer: Any, shape: Shape) -> list[HttpMethod]:
    """The methods of a service of rest.proto for the HTTP server; a method that takes an HttpBody gets its bytes."""
    described = rest_pb2.DESCRIPTOR.services_by_name[service]
    return [
        HttpMethod(
            f"{described.full_name}/{method.name}",
            getattr(servicer, method.name),
            takes_body=method.input_type is HttpBody.DESCRIPTOR,
            error_body=error_body(shape),
            verb=_VERBS.get(method.name, ""),
        )
        for method in described.methods
    ]


class _Comments:
    """Writes comments into a call while it is silent; one task waits for that, so a body costs only two assignments.

    `silent_since` is a time of the loop, None while a body is written.
    """

    def __init__(self, context: Context, after_s: float, head: ResponseHead) -> None:
        self.sent = False
        self.silent_since: float | None = asyncio.get_running_loop().time()
        self._head = head
        self._context = context
        self._after_s = after_s
        self._writing = asyncio.Lock()
        self._task = asyncio.create_task(self._write(), name="keep-alive")

    async def written(self) -> None:
        """Waits for the comment that is being written, if there is one."""
        if self._writing.locked():
            async with self._writing:
                pass

    async def end(self) -> None:
        """Ends the comments; one that the caller does not read is abandoned."""
        self.silent_since = None
        with suppress(TimeoutError):
            await asyncio.wait_for(self.written(), _LAST_COMMENT_S)
        self._task.cancel()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                since = self.silent_since
                if since is None or (due_in_s := since + self._after_s - loop.time()) > 0:
                    await asyncio.sleep(self._after_s if since is None else due_in_s)
                    continue
                self.silent_since, self.sent = loop.time(), True
                async with self._writing:
                    await self._head.send(self._context)
                    await self._context.write(_COMMENT)
        except Exception:  # The caller has left; the call itself will notice.
            logger.debug("a comment was not written", exc_info=True)
