"""From a raw request to a message: its bytes are reserved, its fields counted, and only then is it parsed.

A small message is parsed at once. The fields of a large one are counted on the event loop if they are few, else on a
thread, so that the event loop is not blocked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.rpc import Context
from headrace.rpc.limits.admission import AdmittedCall, charge_of
from headrace.rpc.limits.byte_budget import SMALL_BYTES
from headrace.rpc.limits.wire_limits import MAX_FIELDS, Schema, Walk, schema_of

_FIELDS_AT_ONCE = 1024  # Counted in a millisecond.
_walkers = ThreadPoolExecutor(1, thread_name_prefix="count-fields")


class RequestReading:
    """How the requests of one method are read; raises HeadraceError.

    `method` is the path of a method whose requests are protobuf's, None for one whose requests are not.
    """

    def __init__(self, method: str | None, parse: Callable[[bytes], Any]) -> None:
        self._method = method
        self._parse = parse

    async def only(self, raw: bytes, call: AdmittedCall) -> Any:
        """The one request of a call, whose bytes are reserved until the call ends."""
        if len(raw) <= SMALL_BYTES:
            return self._parsed(raw)
        request, _ = await self.next(raw, call)
        return request

    async def next(self, raw: bytes, call: AdmittedCall) -> tuple[Any, int]:
        """A request of many, and the bytes that are reserved for it."""
        reserved = 0
        if len(raw) > SMALL_BYTES:
            reserved = charge_of(len(raw))
            await call.reserve_in_turn(reserved)
            memory = await self._counted(raw, call)
            call.reserve(memory)
            reserved += memory
        return self._parsed(raw), reserved

    def _parsed(self, raw: bytes) -> Any:
        try:
            return self._parse(raw)
        except DecodeError:
            raise InvalidRequestError("the request is not the message that the method takes") from None

    async def _counted(self, raw: bytes, call: AdmittedCall) -> int:
        """Bytes that the parsed message takes besides its own; raises InvalidRequestError where its fields are many."""
        schema = None if call.is_inner or self._method is None else _schema_of_method(self._method)
        if schema is None:
            return 0
        walk = Walk(raw, schema)
        if not walk.proceed(_FIELDS_AT_ONCE):
            await asyncio.get_running_loop().run_in_executor(_walkers, walk.proceed, MAX_FIELDS + 1)
        return walk.memory


class RequestStream(AsyncIterator[Any]):
    """The requests of one call, as they are read.

    What a request has reserved is released when the next one is read, unless `take` made it the caller's.
    """

    def __init__(self, context: Context, reading: RequestReading, call: AdmittedCall) -> None:
        # Not grpc.aio's iterator: it is a reference cycle, which would keep the last message until it is collected.
        self._context = context
        self._reading = reading
        self._call = call
        self._reserved = 0

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Any:
        self._release()
        raw: Any = await self._call.receive(self._context.read())
        if raw is grpc.aio.EOF:
            raise StopAsyncIteration
        request, self._reserved = await self._reading.next(raw, self._call)
        return request

    def take(self) -> Callable[[], None]:
        """Makes the request that was read last a request in flight, until the function is called that this returns.

        Raises OverloadedError where too many calls are in flight.
        """
        self._call.begin()
        reserved, self._reserved = self._reserved, 0

        def finish() -> None:
            self._call.finish()
            if reserved:
                self._call.release(reserved)

        return finish

    def _release(self) -> None:
        if self._reserved:
            self._call.release(self._reserved)
            self._reserved = 0


def _schema_of_method(path: str) -> Schema | None:
    """The schema of a method's request, None where no descriptor is known."""
    try:
        method = descriptor_pool.Default().FindMethodByName(path.strip("/").replace("/", "."))
    except KeyError:
        return None
    return None if method.input_type is None else schema_of(method.input_type)
