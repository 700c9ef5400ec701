"""Server-sent events from an engine: whole events only, within bounds.

An answer that ends, breaks or falls silent before its end raises; a part of an event is dropped with it.
Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson
from grpc import StatusCode

from headrace.errors import HeadraceError, HopBrokenError
from headrace.rpc.client.interceptors import ClientSpan
from headrace_protos import inference_pb2 as pb
from headrace_transformer.predictors.engines.engine import HOP, Engine, error_of_event
from headrace_transformer.predictors.resume.progress import PredictorLostError

if TYPE_CHECKING:
    import aiohttp  # Loaded where there are engines only: it takes a quarter of a second.

DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"  # It may begin a stream.
_END = re.compile(rb"\r?\n\r?\n|\r\r")
_MAX_EVENT, _MAX_WHOLE = 16 << 20, 64 << 20
_END_S = 1.0  # For what may follow an answer's last token.


class EventStream:
    """The events of one request to an engine; one task reads them, any other may `fail` it."""

    def __init__(self, engine: Engine, path: str, body: dict[str, Any], span: ClientSpan) -> None:
        self.engine = engine
        self._span = span
        self.ended = False
        self.heard: float | None = None
        self._began_ns = time.monotonic_ns()
        self._request = path, body, {"traceparent": span.traceparent} if span.traceparent else {}
        self._response: aiohttp.ClientResponse | None = None
        self._scope: asyncio.Timeout | None = None
        self._error: HeadraceError | None = None
        self._buffer = b""
        engine.begins(self)

    @property
    def is_reading(self) -> bool:
        """Whether somebody waits for the next piece."""
        return self._scope is not None

    @property
    def is_stranded(self) -> bool:
        """Whether the connection is gone, before the end."""
        response = self._response
        return response is not None and response.connection is None and not response.content.at_eof()

    async def read(self) -> list[bytes]:
        """The data of the next events, at least one; raises HeadraceError, also at the end."""
        while not self.ended:
            data = await self._piece()
            if not data and _END.sub(b"", self._buffer):
                raise self._failed(PredictorLostError("the engine's answer ends inside of an event", hop=HOP))
            if not data:
                break
            *events, self._buffer = _END.split(self._buffer + data)
            if len(self._buffer) > _MAX_EVENT:
                raise HopBrokenError(f"the engine sends an event of more than {_MAX_EVENT} bytes", hop=HOP)
            found = [value for event in events if (value := _data(event))]
            if DONE in found:
                self._ended()
                found.remove(DONE)
            if found:
                return found
        raise self._failed(HopBrokenError("the engine ended the answer before its last token", hop=HOP))

    async def raw(self) -> bytes:
        """The next bytes, of an API that is not known here; empty at the end. Raises HeadraceError."""
        data = b"" if self.ended else await self._piece()
        if not data:
            self._ended()
        return data

    async def whole(self) -> bytes:
        """The body of an answer that is no stream; raises HeadraceError."""
        data = bytearray()
        while piece := await self._piece():
            data += piece
            if len(data) > _MAX_WHOLE:
                raise HopBrokenError(f"the engine's answer has more than {_MAX_WHOLE} bytes", hop=HOP)
        self._ended()
        return bytes(data)

    async def rest(self) -> list[bytes]:
        """The events that follow an answer's end; what does not come at once is dropped."""
        found: list[bytes] = []
        with suppress(TimeoutError, HeadraceError):
            async with asyncio.timeout(_END_S):
                while True:
                    found += await self.read()
        self._error = None
        self._ended()
        return found

    def fail(self, error: HeadraceError) -> None:
        """Ends it with an error, at once, also while it is read; only the first one has an effect."""
        if self._error is not None:
            return
        self._error = error
        self._span.end(error.status)
        if self._scope is not None:
            self._scope.reschedule(0)
        self._close()

    def close(self) -> None:
        """Ends the request; the engine cancels what it would still generate."""
        status = StatusCode.OK if self.ended else StatusCode.CANCELLED
        status = status if self._error is None else self._error.status
        if self in self.engine.running:
            self.engine.running.remove(self)
            _count(self.engine.statistics, status, time.monotonic_ns() - self._began_ns)
        self._span.end(status)
        self._close()

    def _failed(self, error: HeadraceError) -> HeadraceError:
        """What ended it: the error, unless it has failed before."""
        self._error = self._error or error
        return self._error

    def _ended(self) -> None:
        self.ended = True
        self._span.end(StatusCode.OK)

    def _close(self) -> None:
        if self._response is not None and not self.ended:
            self._response.close()  # With its connection.
        elif self._response is not None:
            self._response.release()

    async def _piece(self) -> bytes:
        """More of the answer, empty at its end."""
        import aiohttp

        if self._error is not None:
            raise self._error
        if self.heard is not None:
            self.heard = time.monotonic()  # A reader that is slow is not the engine's silence.
        try:
            async with asyncio.timeout(None) as self._scope:
                if self._response is None:
                    self._response = await self.engine.post(*self._request)
                data = await self._response.content.readany()
        except TimeoutError:
            raise self._failed(PredictorLostError("the engine is silent", hop=HOP)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(PredictorLostError(f"the engine's answer breaks off: {error}", hop=HOP)) from None
        except HeadraceError as error:
            raise self._failed(error) from None
        finally:
            self._scope = None
        if self._error is not None:
            raise self._error
        self.heard = self.engine.heard = time.monotonic()
        self._span.message()
        return data


def parsed(data: bytes) -> dict[str, Any]:
    """The object of an event, or of a whole answer; raises HeadraceError, also the one that it carries."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise HopBrokenError("the engine sends what is no JSON object", hop=HOP)
    if (error := error_of_event(value)) is not None:
        raise error
    return value


def _count(statistics: pb.ModelStatistics, status: StatusCode, ns: int) -> None:
    """Counts a request; one that its caller cancelled is neither a success nor a failure."""
    durations = statistics.inference_stats
    counted = [] if status is StatusCode.CANCELLED else [durations.fail]
    if status is StatusCode.OK:
        # An engine does not say how long a request waits there. Clients require the same count in all of these.
        counted = [durations.success, durations.compute_infer, durations.queue]
        counted += [durations.compute_input, durations.compute_output]
        statistics.inference_count += 1
        statistics.execution_count += 1
    statistics.last_inference = int(time.time() * 1000)
    for each in counted:
        each.count += 1
    for each in counted[:2]:
        each.ns += ns


def _data(event: bytes) -> bytes:
    lines = event.removeprefix(_BOM).splitlines()
    lines = [line[5:].strip() for line in lines if line.startswith(b"data:")]  # JSON, or DONE: space has no meaning.
    return b"\n".join(lines)
