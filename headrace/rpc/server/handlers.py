"""The server's side of a call: observed, admitted, read, handled, and its errors mapped, in one function.

A `HeadraceError` becomes its gRPC status, `NotImplementedError` UNIMPLEMENTED, and `AbortError` passes. Any other
exception is logged with its traceback and becomes INTERNAL with the message "internal error".

In a stream that the gateway transcodes, message by message, into lines of JSON, a failed call looks to a REST client,
which sees no trailers, like a complete one. `errors_in_band` gives it one more message, of which only the field `error`
is set. The call itself ends with its status all the same, for the trace and the access log.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc import StatusCode

from headrace.deadline import DEADLINE_MARGIN_S
from headrace.errors import HeadraceError, InvalidRequestError, NotImplementedMethodError, RequestFailedError
from headrace.rpc import Context, Handler
from headrace.rpc.limits.admission import Admission, AdmittedCall
from headrace.rpc.limits.request_reading import RequestReading, RequestStream
from headrace.rpc.server.call_telemetry import ServerSpan, ServerTelemetry
from headrace.telemetry.identity import Metadata, protocol_of
from headrace.telemetry.rpc import status_of

logger = logging.getLogger(__name__)

Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


async def _refuse(_: Any, __: Any) -> None:
    raise NotImplementedError


_UNKNOWN_METHOD: Handler = grpc.stream_stream_rpc_method_handler(_refuse)


class Interceptor(grpc.aio.ServerInterceptor):
    """The one interceptor of a server.

    `hop` is the `x-failed-hop` of errors that name no hop of their own; without `telemetry` calls get no spans, metrics
    and log lines.
    """

    def __init__(self, hop: str, admission: Admission | None = None, telemetry: ServerTelemetry | None = None) -> None:
        self.hop = hop
        self.admission = admission or Admission()
        self.telemetry = telemetry
        self._handlers: dict[str, Handler] = {}  # By method, of those that are known.

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        served = self._handlers.get(method)
        if served is None:
            handler = await continuation(handler_call_details)
            served = ServedMethod(self, method, handler or _UNKNOWN_METHOD).handler
            if handler is not None:
                self._handlers[method] = served
        return served


class ServedMethod:
    """A method as it is served; `handler` is what grpc calls, `serve` what an HTTP server does (http2/exchange.py).

    Requests are received and parsed here, within what admission lets in. Left to grpc, what cannot be parsed is
    answered with grpc's insides, and a call that ends without the one message of its method is not answered at all:
    grpc.aio's handlers of such methods just return.
    """

    def __init__(
        self, server: Interceptor, method: str, handler: Handler, reading: RequestReading | None = None
    ) -> None:
        self._server = server
        self._method = method
        self._behaviour: Any = (
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )
        self._yields = inspect.isasyncgenfunction(self._behaviour)
        self._reading = reading or RequestReading(method, handler.request_deserializer or bytes)
        self._takes_stream = handler.request_streaming
        self._streams = handler.response_streaming
        telemetry = server.telemetry
        self._telemetry = None if telemetry is None else telemetry.of(method, handler.response_streaming)
        factory: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        self.handler: Handler = factory(self.serve, None, handler.response_serializer)

    async def serve(self, _: Any, context: Context) -> Any:
        """Serves one call, in a task of its own; raises AbortError after an error."""
        metadata = tuple(context.invocation_metadata() or ())
        if self._telemetry is None:
            return await self._answer(context, metadata, None)
        observed, code = ServerSpan(self._telemetry, metadata), StatusCode.OK
        try:
            response = await self._answer(context, metadata, observed)
            code = status_of(context.code())
            return response
        except (asyncio.CancelledError, GeneratorExit):
            remaining = context.time_remaining()
            passed = remaining is not None and remaining <= DEADLINE_MARGIN_S
            code = StatusCode.DEADLINE_EXCEEDED if passed else StatusCode.CANCELLED
            raise
        except BaseException:
            code = status_of(context.code(), StatusCode.UNKNOWN)
            raise
        finally:
            observed.end(code)

    async def _answer(self, context: Context, metadata: Metadata, observed: ServerSpan | None) -> Any:
        call = self._server.admission.call(self._method, self._takes_stream, metadata)
        try:
            async with call:
                if self._takes_stream:
                    request: Any = RequestStream(context, self._reading, call)
                else:
                    raw: Any = await call.receive(context.read())
                    if raw is grpc.aio.EOF:
                        raise InvalidRequestError("the call carries no message")
                    call.begin()
                    request = await self._reading.only(raw, call)
                if self._yields:
                    await self._write_all(request, context, observed, call)
                    return None
                result = self._behaviour(request, context)
                response = await result if inspect.isawaitable(result) else result
                if not self._streams:
                    await call.head.send(context)
                return response
        except HeadraceError as error:
            await self._abort(context, error, call)
        except grpc.aio.AbortError as aborted:
            _forget_at_end(aborted)
            raise
        except NotImplementedError:
            # What the generated base class raises for a method that a servicer does not override.
            await self._abort(context, NotImplementedMethodError(f"{self._method} is not implemented"), call)
        except Exception:
            logger.exception("%s failed", self._method)
            await self._abort(context, RequestFailedError("internal error"), call)

    async def _write_all(self, request: Any, context: Context, observed: ServerSpan | None, call: AdmittedCall) -> None:
        """Writes the responses. Left to grpc, a call cancelled during a write would leave the generator open until the
        garbage collector came by, and the engine at work without a reader."""
        async with aclosing(self._behaviour(request, context)) as responses:
            async for response in responses:
                if not call.head.is_sent:
                    await call.head.send(context)
                await context.write(response)
                if observed is not None:
                    observed.first_message()
                    observed = None
        await call.head.send(context)

    async def _abort(self, context: Context, error: HeadraceError, call: AdmittedCall) -> None:
        earlier = tuple(context.trailing_metadata() or ()) + call.head.take()
        try:
            await context.abort(error.status, error.message, earlier + error.trailing_metadata(self._server.hop))
        except grpc.aio.AbortError as aborted:
            _forget_at_end(aborted)
            raise


def _forget_at_end(aborted: grpc.aio.AbortError) -> None:
    """Frees what a call that is aborted holds, when its task has ended.

    grpc.aio keeps the exception with the call's state, which the frames of its traceback refer to: a cycle that no
    collector finds, with the request in it, for each call that fails.
    """

    def forget(_: Any) -> None:
        aborted.__traceback__ = aborted.__context__ = None

    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(forget)


ResponseT = TypeVar("ResponseT")
_Streaming: TypeAlias = Callable[[Any, Any, Context], AsyncGenerator[ResponseT, None]]


def errors_in_band(
    response_type: Callable[..., ResponseT], *, headers_are_out: bool = False
) -> Callable[[_Streaming[ResponseT]], _Streaming[ResponseT]]:
    """Gives a streaming handler a last `response_type(error=…)` where it fails after its first response or headers."""

    def decorate(handler: _Streaming[ResponseT]) -> _Streaming[ResponseT]:
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
