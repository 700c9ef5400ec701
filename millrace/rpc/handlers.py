"""The server's side of a call: its handler inside guards, the first of which admits it and maps its errors.

A `MillraceError` becomes its gRPC status; anything else that escapes a handler is logged with its traceback and becomes
INTERNAL with a text that says nothing of the inside.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from millrace.errors import InvalidRequestError, MillraceError, NotImplementedMethodError, RequestFailedError
from millrace.rpc.admission import Admission, Call
from millrace.rpc.request_reading import RequestReading, RequestStream

logger = logging.getLogger(__name__)

# Text, because grpc's classes are generic to the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Guard: TypeAlias = "Callable[[Context], AbstractAsyncContextManager[Any]]"
Reader: TypeAlias = "Callable[[Any, Context, Any], Awaitable[Any]]"

_first_message: ContextVar[Callable[[], None] | None] = ContextVar("first_message", default=None)


def on_first_message(tell: Callable[[], None]) -> None:
    """From inside a guard: has `tell` called when the first message of an answer that streams has been written."""
    _first_message.set(tell)


def _tell_first_message() -> None:
    tell = _first_message.get()
    if tell is not None:
        _first_message.set(None)
        tell()


def guard_handler(handler: Handler, guard: Guard, read: Reader | None = None) -> Handler:
    """The same handler with each of its calls run inside `guard(context)`.

    With `read`, which makes of a stream of raw requests what the handler takes, receiving and parsing
    happen inside as well; it gets what the guard gives.
    """
    behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    deserializer = handler.request_deserializer if read is None else None
    request_streaming = handler.request_streaming or read is not None

    async def received(request: Any, context: Context, guarded: Any) -> Any:
        return request if read is None else await read(request, context, guarded)

    if inspect.isasyncgenfunction(behaviour):
        # It writes by itself: were it a generator, a call cancelled during a write would leave it open
        # until the garbage collector came by, and the engine at work without a reader.
        async def write_all(request: Any, context: Any) -> None:
            async with (
                guard(context) as given,
                aclosing(behaviour(await received(request, context, given), context)) as responses,
            ):
                async for response in responses:
                    await context.write(response)
                    _tell_first_message()

        guarded: Any = write_all
    else:

        async def call(request: Any, context: Any) -> Any:
            async with guard(context) as given:
                result = behaviour(await received(request, context, given), context)
                return await result if inspect.isawaitable(result) else result

        guarded = call

    factory = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[request_streaming, handler.response_streaming]
    return factory(guarded, deserializer, handler.response_serializer)


def _reader(method: str, handler: Handler) -> Reader:
    """Takes and parses a handler's raw requests, within what admission lets in.

    Left to grpc, what cannot be parsed is answered with grpc's insides, and a call that ends without the
    one message of its method is not answered at all: grpc.aio's handlers of such methods just return.
    """
    reading = RequestReading(method, handler.request_deserializer or bytes)

    async def read_one(_: Any, context: Context, call: Call) -> Any:
        raw: Any = await call.receive(context.read())
        if raw is grpc.aio.EOF:
            raise InvalidRequestError("the call carries no message")
        call.begin()
        return await reading.only(raw, call)

    async def read_all(_: Any, context: Context, call: Call) -> AsyncIterator[Any]:
        return RequestStream(context, reading, call)

    return read_all if handler.request_streaming else read_one


async def _refuse(_: Any, __: Any) -> None:
    raise NotImplementedError


_UNKNOWN_METHOD: Handler = grpc.stream_stream_rpc_method_handler(_refuse)


class ErrorServerInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls and their requests, and reports what a handler raises as a gRPC status, signed with this hop."""

    def __init__(self, hop: str, admission: Admission | None = None) -> None:
        self._hop = hop
        self._admission = admission or Admission()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        handler = await continuation(handler_call_details) or _UNKNOWN_METHOD

        streams = handler.request_streaming

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[Call]:
            try:
                async with self._admission.call(method, streams) as call:
                    yield call
            except MillraceError as error:
                await self._abort(context, error)
            except grpc.aio.AbortError as aborted:
                _forget_at_end(aborted)
                raise
            except NotImplementedError:
                # What the generated base class raises for a method that a servicer does not override.
                await self._abort(context, NotImplementedMethodError(f"{method} is not implemented"))
            except Exception:
                logger.exception("%s failed", method)
                await self._abort(context, RequestFailedError("internal error"))

        return guard_handler(handler, guard, _reader(method, handler))

    async def _abort(self, context: Context, error: MillraceError) -> None:
        earlier = tuple(context.trailing_metadata() or ())
        try:
            await context.abort(error.status, error.message, earlier + error.trailing_metadata(self._hop))
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
