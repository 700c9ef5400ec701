"""The call of one transformer: its submissions to the engines, their steps back to it.

The bytes of an engine's steps pass unparsed. While the transformer does not read, steps are collected and sent as few
messages of about 8 MiB at most: the concatenation of serialized messages is the serialization of their merger. The
collected steps are bounded by the tokens that the sequences in flight may have. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from headrace.deadline import Deadline
from headrace.errors import (
    DrainingError,
    HeadraceError,
    InvalidRequestError,
    NotImplementedMethodError,
    RequestFailedError,
)
from headrace.step_errors import write_error
from headrace_predictor.engine_process.remote_engine import RemoteEngine
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.generation.requests import read_submission
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.steps.engine_stream import EngineStream
from headrace_predictor.steps.sequence import SequenceCall, SequenceTelemetry, StepsSequence, status_of
from headrace_protos import steps_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# How long an acceptance waits for a step to share its message: a separate message costs more than the acceptance.
_ACCEPTANCE_S = 0.02
_LOADS_S = 0.1  # The least time between two reports of the loads, unless a model becomes ready or stops being ready.
_MESSAGE_BYTES = 8 * 1024 * 1024
_LEAVING = steps_pb2.Step(leaving=True).SerializeToString()


class StepsCall:
    """See the module. `stopping` is set when the process accepts no new calls; `port` is told to the transformer."""

    def __init__(self, repository: ModelRepository, stopping: asyncio.Event, port: int = 0) -> None:
        self._repository = repository
        self._stopping = stopping
        self._telemetry = SequenceTelemetry()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[RemoteEngine, EngineStream] = {}
        self._sequences: dict[int, EngineStream] = {}  # In flight, by number.
        self._pending: deque[bytes] = deque([steps_pb2.Step(port=port).SerializeToString()] if port else ())
        self._accepted: asyncio.TimerHandle | None = None  # Sends acceptances that no step's message has carried.
        # Sequences that run in isolation from now on: confirmed to the engine once the transformer has been sent the
        # notice.
        self._isolated: list[tuple[EngineStream, int]] = []
        self._due = asyncio.Event()
        self._due.set()
        self._loads_due = True
        self._loads_at = 0.0
        self._sent_at = self._loop.time()
        self._is_half_closed = False
        self._failure: HeadraceError | None = None
        self._is_closed = False

    async def run(
        self, requests: AsyncIterator[steps_pb2.StepsRequest], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Writes serialized steps until the call is over.

        Raises DrainingError when the predictor stops, and the HeadraceError of a request that cannot be read.
        """
        reader = asyncio.create_task(self._read(requests), name="steps-requests")
        stop = asyncio.create_task(self._stopping.wait(), name="steps-stop")
        stop.add_done_callback(lambda _: self._due.set())
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)
        self._repository.watchers.add(self._models_changed)
        try:
            while not self._is_over():
                await self._due.wait()
                self._due.clear()
                isolated, self._isolated = self._isolated, []
                if message := self._message():
                    await write(message)
                for stream, number in isolated:
                    stream.engine.report_alone(stream.channel, number)
            if self._failure is not None:
                raise self._failure
        finally:
            self._repository.watchers.discard(self._models_changed)
            self._timer.cancel()
            if self._accepted is not None:
                self._accepted.cancel()
            self._close()
            for task in (reader, stop):
                task.cancel()
            await asyncio.gather(reader, stop, return_exceptions=True)

    def put(self, step: bytes) -> None:
        """Adds a serialized step to the next message."""
        if not self._is_closed:
            self._pending.append(step)
            self._due.set()

    def announce_isolated(self, stream: EngineStream, number: int) -> None:
        """Confirms to the engine that a sequence runs isolated, once the transformer has been sent the notice."""
        self._isolated.append((stream, number))

    def forget(self, number: int) -> None:
        """The sequence has ended."""
        self._sequences.pop(number, None)
        if self._is_half_closed or self._stopping.is_set():
            self._due.set()

    async def _read(self, requests: AsyncIterator[steps_pb2.StepsRequest]) -> None:
        try:
            async for request in requests:
                for submission in request.submissions:
                    self._submit(submission)
                for number in request.cancelled:
                    if (stream := self._sequences.get(number)) is not None:
                        stream.cancel(number)
        except HeadraceError as error:
            self._failure = error
        except Exception:
            logger.exception("the requests of a steps call could not be read")
            self._failure = RequestFailedError("internal error")
        self._is_half_closed = True
        self._due.set()

    def _submit(self, message: steps_pb2.Submission) -> None:
        if message.number in self._sequences:
            raise InvalidRequestError(f"sequence {message.number} is in flight already")
        call = SequenceCall(message, self._telemetry)
        try:
            self._begin(call, message)
        except HeadraceError as error:
            self._refuse(message.number, error)
            call.end(status_of(error))
        except Exception:
            logger.exception("request %s could not be submitted", message.request_id)
            failure = RequestFailedError("internal error")
            self._refuse(message.number, failure)
            call.end(status_of(failure))

    def _begin(self, call: SequenceCall, message: steps_pb2.Submission) -> None:
        """Submits a sequence to its engine; raises the HeadraceError of a refusal."""
        serving = self._repository.get(message.model)
        if self._stopping.is_set():
            raise DrainingError("the predictor is stopping")
        model = serving.model
        if not isinstance(model, GenerationModel):
            raise InvalidRequestError(f"model {message.model!r} does not generate tokens")
        if not isinstance(model.engine, RemoteEngine):
            raise NotImplementedMethodError(f"model {message.model!r} has no engine process")
        deadline = Deadline.after(message.timeout_s if message.HasField("timeout_s") else None)
        stream = self._stream(model.engine)
        sequence = StepsSequence(call, serving, model, message, deadline, partial(stream.hand_back, message.number))
        try:
            request = read_submission(model.loaded, message, deadline)
            stream.begin(
                message.number, sequence, partial(model.engine.generate, stream.channel, message.number, request)
            )
        except HeadraceError as error:
            sequence.release(error)
            raise
        self._sequences[message.number] = stream
        accepted = steps_pb2.Accepted(number=message.number, fingerprint=serving.fingerprint, span=call.traceparent)
        self._pending.append(steps_pb2.Step(accepted=[accepted]).SerializeToString())
        if self._accepted is None:
            self._accepted = self._loop.call_later(_ACCEPTANCE_S, self._due.set)

    def _refuse(self, number: int, error: HeadraceError) -> None:
        ended = steps_pb2.Ended(number=number, error=write_error(error, "predictor"))
        self.put(steps_pb2.Step(ended=[ended]).SerializeToString())

    def _stream(self, engine: RemoteEngine) -> EngineStream:
        stream = self._streams.get(engine)
        if stream is None:
            for other in [other for other in self._streams if other.has_ended]:
                del self._streams[other]
            stream = self._streams[engine] = EngineStream(self, engine)
        return stream

    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        if self._pending or self._sequences:
            return False
        if self._is_half_closed:
            return True
        # Hand-over (`stopping`, no drain): the call ends when it has no sequences. Drain: it stays open until the drain
        # has ended.
        if self._repository.is_drained or (self._stopping.is_set() and not self._repository.is_draining):
            self._failure = DrainingError("the predictor is stopping")
            return True
        return False

    def _message(self) -> bytes:
        """The message to send now; empty if there is none."""
        now = self._loop.time()
        parts, size = [], 0
        while self._pending and size < _MESSAGE_BYTES:
            parts.append(self._pending.popleft())
            size += len(parts[-1])
        if self._pending:
            self._due.set()
        if self._accepted is not None:
            self._accepted.cancel()
            self._accepted = None
        is_silent = now - self._sent_at >= HEARTBEAT_S
        if self._loads_due or is_silent or (parts and now - self._loads_at >= _LOADS_S):
            parts.append(steps_pb2.Step(loads=self._loads()).SerializeToString())
            self._loads_due, self._loads_at = False, now
        if parts:
            self._sent_at = now
            if self._repository.is_leaving:
                parts.append(_LEAVING)
        return b"".join(parts)

    def _loads(self) -> steps_pb2.EngineLoads:
        loads = steps_pb2.EngineLoads()
        for serving in self._repository.served:
            model = serving.model
            if isinstance(model, GenerationModel) and self._repository.is_ready(model.name):
                load = model.engine.load
                loads.models.add(
                    model=model.name,
                    fingerprint=serving.fingerprint,
                    running=load.running,
                    waiting=load.waiting,
                    waiting_tokens=load.waiting_tokens,
                    cache_free=1 - load.blocks_in_use,
                )
        return loads

    def _models_changed(self) -> None:
        self._loads_due = True
        self._due.set()

    def _beat(self) -> None:
        left_s = self._sent_at + HEARTBEAT_S - self._loop.time()
        if left_s <= 0:
            self._due.set()
        self._timer = self._loop.call_later(left_s if left_s > 0 else HEARTBEAT_S, self._beat)

    def _close(self) -> None:
        """Cancels every sequence."""
        self._is_closed = True
        self._pending.clear()
        for stream in tuple(self._streams.values()):
            stream.close()
