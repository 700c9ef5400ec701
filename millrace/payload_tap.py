"""Records of requests and answers, taken beside the stream and shipped to the payload logger.

`tap.begin(...)` opens a `Recording`; its methods cost microseconds, never await, never block and
never raise: whatever happens here, the stream goes on. A record is sent when its recording ends.

Records wait in memory, at most `capacity_bytes` of them in serialized form; one more is dropped,
counted in `dropped` by reason, and warned about at most once a minute. `ship` sends them over one
bidirectional `PayloadIngest/Append` call and forgets what is acknowledged. Whatever is not is sent
again with the same (source, sequence), which the logger takes as the same record: nothing is lost
while this process lives, nothing is stored twice. A record gets its sequence when it is queued, so
drops leave no gap.

Everything here belongs to one event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import grpc

from millrace.errors import MillraceError
from millrace.protos.millrace_pb2 import AppendRequest, AppendResponse, PayloadRecord, Usage
from millrace.server import MAX_MESSAGE_BYTES, MESSAGE_OPTIONS
from millrace.uuid7 import as_uuid7, next_id

logger = logging.getLogger(__name__)

FULL, TOO_LARGE, FAILED = "full", "too_large", "failed"  # Why a record was dropped.

_APPEND = "/millrace.v1.PayloadIngest/Append"
_MAX_IN_FLIGHT = 256  # Records sent and not yet acknowledged.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_WARN_EVERY_S = 60.0
_CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A logger that is stopped but not dead keeps its connection: only a ping tells.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)


class _Queued(NamedTuple):
    sequence: int
    request: bytes  # A serialized AppendRequest.


class PayloadTap:
    """Opens recordings and ships them to the logger at `target` (host:port).

    `hop` signs the recorded errors that name no other hop.
    """

    def __init__(self, target: str, capacity_bytes: int = 64 * 1024 * 1024, hop: str = "transformer") -> None:
        self.dropped: Counter[str] = Counter()
        self.queued_bytes = 0
        self.hop = hop
        self._target = target
        self._capacity_bytes = capacity_bytes
        self._source = str(uuid.uuid4())
        self._sequence = 0  # Of the newest record queued.
        self._acknowledged = 0  # Of the newest record that the logger has committed.
        self._last_id = 0
        self._queue: deque[_Queued] = deque()
        self._in_flight = 0  # How many at the queue's head were sent over the current call.
        self._changed = asyncio.Event()
        self._all_acknowledged = asyncio.Event()
        self._all_acknowledged.set()
        self._shipping = asyncio.Lock()
        self._next_warning: dict[str, float] = {}

    def begin(
        self,
        *,
        request_id: str,
        model: str,
        protocol: str,
        prompt: str = "",
        parameters: str = "",
        trace_id: str = "",
    ) -> Recording:
        """Opens the recording of a request that arrived now; `parameters` is JSON."""
        now_ns = time.time_ns()
        self._last_id = next_id(now_ns // 1_000_000, self._last_id)
        recording = Recording(self, str(as_uuid7(self._last_id)), now_ns)
        recording.request_id = request_id
        recording.model = model
        recording.protocol = protocol
        recording.prompt = prompt
        recording.parameters = parameters
        recording.trace_id = trace_id
        return recording

    async def ship(self) -> None:
        """Sends what is queued until it is cancelled, over calls one after the other."""
        backoff_s = _MIN_BACKOFF_S
        # Not `open_channel`: its span would last as long as the process, and this call belongs to no request.
        channel = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        # One shipper at a time: `drain` brings its own, which waits for this one to end.
        async with channel, self._shipping:
            while True:
                acknowledged = self._acknowledged
                try:
                    await self._ship_over_one_call(channel)
                    reason = "it ended the call"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                self._warn("away", "the payload logger at %s is away (%s)", self._target, reason)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S) if acknowledged == self._acknowledged else _MIN_BACKOFF_S
                # Spread, so that several transformers do not come back in the same instant.
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311

    async def drain(self, timeout_s: float) -> bool:
        """Ships until all is acknowledged or the time is up; False where some is not."""
        shipper = asyncio.create_task(self.ship(), name="payload drain")
        try:
            await asyncio.wait_for(self._all_acknowledged.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d payload records were not acknowledged in time and are lost", len(self._queue))
        finally:
            await _end(shipper)
        return not self._queue

    async def _ship_over_one_call(self, channel: grpc.aio.Channel) -> None:
        # No serializer: requests lie in the queue as they go over the wire.
        append: grpc.aio.StreamStreamMultiCallable[bytes, AppendResponse] = channel.stream_stream(
            _APPEND, response_deserializer=AppendResponse.FromString
        )
        call = append()
        self._in_flight = 0
        sender = asyncio.create_task(self._send(call), name="payload sender")
        try:
            async for response in call:
                self._acknowledge(response.sequence)
        finally:
            await _end(sender)
            call.cancel()

    async def _send(self, call: grpc.aio.StreamStreamCall[bytes, AppendResponse]) -> None:
        # A call that is over says why to its reader.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._in_flight < min(len(self._queue), _MAX_IN_FLIGHT):
                    request = self._queue[self._in_flight].request
                    self._in_flight += 1
                    await call.write(request)
                self._changed.clear()
                await self._changed.wait()

    def _acknowledge(self, sequence: int) -> None:
        self._acknowledged = sequence
        while self._queue and self._queue[0].sequence <= sequence:
            self.queued_bytes -= len(self._queue.popleft().request)
            self._in_flight -= 1
        self._changed.set()
        if not self._queue:
            self._all_acknowledged.set()

    def _put(self, record: PayloadRecord) -> None:
        request = AppendRequest(source=self._source, sequence=self._sequence + 1, record=record).SerializeToString()
        if len(request) > MAX_MESSAGE_BYTES:
            self._drop(TOO_LARGE)
        elif self.queued_bytes + len(request) > self._capacity_bytes:
            self._drop(FULL)
        else:
            self._sequence += 1
            self._queue.append(_Queued(self._sequence, request))
            self.queued_bytes += len(request)
            self._all_acknowledged.clear()
            self._changed.set()

    def _drop(self, reason: str, exc_info: bool = False) -> None:
        self.dropped[reason] += 1
        self._warn(reason, "payload record dropped: %s (%d so far)", reason, self.dropped[reason], exc_info=exc_info)

    def _warn(self, topic: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now >= self._next_warning.get(topic, now):
            self._next_warning[topic] = now + _WARN_EVERY_S
            logger.warning(message, *arguments, exc_info=exc_info)


class Recording:
    """One request's record in the making; its fields may be set until it ends.

    As a context manager it ends with the block: an error as that error, anything else that has not
    been ended as CANCELLED. The whole record is dropped and counted where a part cannot be kept.
    """

    request_id: str
    model: str
    protocol: str
    prompt: str
    parameters: str
    trace_id: str

    def __init__(self, tap: PayloadTap, record_id: str, time_ns: int) -> None:
        self.record_id = record_id
        self._tap = tap
        self._begun = time.monotonic()
        self._open = True
        self._texts: list[str] = []
        self._record = PayloadRecord(record_id=record_id)
        self._record.time.FromMicroseconds(time_ns // 1_000)

    def chunk(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Adds what went to the client just now."""
        if not self._open:
            return
        try:
            offset_ms = self._elapsed_ms()
            self._record.chunks.add(offset_ms=offset_ms, text=_storable(text), token_ids=token_ids)
            self._texts.append(text)
            if len(token_ids) and not self._record.HasField("ttft_ms"):
                self._record.ttft_ms = offset_ms
        except Exception:
            self._fail()

    def end(
        self,
        status: str,
        message: str = "",
        failed_hop: str = "",
        finish_reason: str = "",
        usage: Usage | None = None,
        text: str | None = None,
    ) -> None:
        """Closes the record and queues it; only the first call counts.

        `status` is the name of a gRPC status; `text` is the whole answer where that is not its chunks' texts.
        """
        if not self._open:
            return
        try:
            record = self._record
            for field in ("request_id", "model", "protocol", "prompt", "parameters", "trace_id"):
                setattr(record, field, _storable(getattr(self, field)))
            record.status = status
            record.message = _storable(message)
            record.failed_hop = failed_hop
            record.finish_reason = finish_reason
            record.text = _storable("".join(self._texts) if text is None else text)
            if usage is not None:
                record.usage.CopyFrom(usage)
            record.duration_ms = self._elapsed_ms()
            self._tap._put(record)
            self._open = False
        except Exception:
            self._fail()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, MillraceError):
            self.end(error.status.name, error.message, error.hop or self._tap.hop)
        elif isinstance(error, Exception):
            self.end("INTERNAL", "internal error", self._tap.hop)
        else:
            self.end("CANCELLED", "aborted")

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._begun) * 1000

    def _fail(self) -> None:
        self._open = False
        self._tap._drop(FAILED, exc_info=True)


def _storable(text: str) -> str:
    """The text as protobuf takes it: JSON can smuggle in halves of surrogate pairs, which UTF-8 has no bytes for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    # Not `await task`: its CancelledError and one that is meant for the caller could not be told apart.
    await asyncio.wait((task,))
    if not task.cancelled():
        task.result()
