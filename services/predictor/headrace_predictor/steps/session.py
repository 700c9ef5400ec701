"""The connection of one transformer: its submissions to the engines, their steps back to it.

The bytes of an engine's steps pass unparsed. While the transformer does not read, steps are collected and sent as few
messages of about 8 MiB at most: the concatenation of serialized messages is the serialization of their merger. The
collected steps are bounded by the tokens that the sequences in flight may have. Owned by the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from headrace.errors import (
    DrainingError,
    HeadraceError,
    InvalidRequestError,
    NotImplementedMethodError,
    RequestFailedError,
)
from headrace.frames import FrameConnection, read_error, write_error
from headrace_predictor.engine_process.remote_engine import RemoteEngine
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.generation.requests import complete
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.steps.sequence import SequenceTelemetry, StepsSequence
from headrace_protos import engine_pb2, steps_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# How long an acceptance waits for a step to share its message: a separate message costs more than the acceptance.
_ACCEPTANCE_S = 0.02
_LOADS_S = 0.1  # The least time between two reports of the loads, unless a model becomes ready or stops being ready.
_SILENCE_S = 40.0  # A transformer that is alive sends something every ten seconds.
_MESSAGE_BYTES = 8 * 1024 * 1024
_LEAVING = steps_pb2.Step(leaving=True).SerializeToString()


class TransformerSession:
    """See the module. It runs from the moment that `connection` is made to its end.

    It closes the connection when the predictor stops. `stopping` is set when the process accepts no new calls.
    """

    def __init__(self, repository: ModelRepository, stopping: asyncio.Event) -> None:
        self._repository = repository
        self._stopping = stopping
        self._telemetry = SequenceTelemetry()
        self._loop = asyncio.get_running_loop()
        self._channels: dict[RemoteEngine, int] = {}  # The session's number there.
        self._sequences: dict[int, tuple[RemoteEngine, StepsSequence]] = {}  # In flight, by number.
        self._pending: deque[bytes] = deque()
        self._accepted: asyncio.TimerHandle | None = None  # Sends acceptances that no step's message has carried.
        # Sequences that run in isolation from now on: confirmed to the engine once the transformer has been sent the
        # notice.
        self._isolated: list[tuple[RemoteEngine, int]] = []
        self._send_is_due = False
        self._loads_due = True
        self._loads_at = 0.0
        self._sent_at = self._heard_at = self._loop.time()
        self.connection = FrameConnection(self._receive, self.send_soon)
        self.connection.ended.add_done_callback(self._close)
        self._timer = self._loop.call_later(HEARTBEAT_S, self._beat)
        repository.watchers.add(self._models_changed)

    def send_soon(self) -> None:
        """Sends at the end of this turn of the event loop, as one message for all that comes in it; closes the
        connection if it is over."""
        if not self._send_is_due:
            self._send_is_due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._send_is_due = False
        if not self.connection.can_send:
            return
        isolated, self._isolated = self._isolated, []
        if message := self._message():
            self.connection.send(message)
        for engine, number in isolated:
            engine.report_alone(self._channels.get(engine, 0), number)
        if self._is_over():
            self.connection.close()

    def _receive(self, message: bytes) -> None:
        """Raises InvalidRequestError, or DecodeError, for what ends the connection."""
        self._heard_at = self._loop.time()
        request = steps_pb2.StepsRequest.FromString(message)
        for submission in request.submissions:
            self._submit(submission)
        for number in request.cancelled:
            self._cancel(number)

    def _submit(self, serialized: bytes) -> None:
        message = steps_pb2.Submission.FromString(serialized)
        if message.number in self._sequences:
            raise InvalidRequestError(f"sequence {message.number} is in flight already")
        sequence = StepsSequence(message, self._telemetry)
        try:
            self._begin(sequence, message, serialized)
        except HeadraceError as error:
            self._refuse(message.number, error)
            sequence.end(error)
        except Exception:
            logger.exception("request %s could not be submitted", message.request_id)
            failure = RequestFailedError("internal error")
            self._refuse(message.number, failure)
            sequence.end(failure)

    def _begin(self, sequence: StepsSequence, message: steps_pb2.Submission, serialized: bytes) -> None:
        """Submits a sequence to its engine; raises the HeadraceError of a refusal."""
        serving = self._repository.get(message.model)
        if self._stopping.is_set():
            raise DrainingError("the predictor is stopping")
        model = serving.model
        if not isinstance(model, GenerationModel):
            raise InvalidRequestError(f"model {message.model!r} does not generate tokens")
        if not isinstance(model.engine, RemoteEngine):
            raise NotImplementedMethodError(f"model {message.model!r} has no engine process")
        sequence.lease(serving)
        channel = self._channel_of(model.engine)
        # The concatenation of serialized messages is the serialization of their merger.
        serialized += complete(model.loaded, message, channel, sequence.deadline).SerializeToString()
        model.engine.generate(channel, message.number, serialized, sequence.timeline)
        sequence.begin(model, partial(self._hand_back, message.number))
        self._sequences[message.number] = model.engine, sequence
        accepted = steps_pb2.Accepted(number=message.number, fingerprint=serving.fingerprint, span=sequence.traceparent)
        self._pending.append(steps_pb2.Step(accepted=[accepted]).SerializeToString())
        if self._accepted is None:
            self._accepted = self._loop.call_later(_ACCEPTANCE_S, self.send_soon)

    def _refuse(self, number: int, error: HeadraceError) -> None:
        ended = steps_pb2.Ended(number=number, error=write_error(error, "predictor"))
        self._put(steps_pb2.Step(ended=[ended]).SerializeToString())

    def _cancel(self, number: int) -> None:
        """Ends a sequence for its caller at once; the engine may still finish its current step."""
        if (found := self._forget(number)) is not None:
            engine, sequence = found
            engine.cancel(self._channels[engine], number)
            sequence.cancel()

    def _hand_back(self, number: int, error: HeadraceError) -> None:
        """Ends a sequence with `error`, at the engine and towards the transformer."""
        if (found := self._forget(number)) is not None:
            engine, sequence = found
            engine.end(self._channels[engine], number)
            self._refuse(number, error)
            sequence.end(error)

    def _forget(self, number: int) -> tuple[RemoteEngine, StepsSequence] | None:
        """The sequence, which ends now; None if it has ended."""
        if self._stopping.is_set():
            self.send_soon()
        return self._sequences.pop(number, None)

    def _channel_of(self, engine: RemoteEngine) -> int:
        if engine not in self._channels:
            self._channels = {other: channel for other, channel in self._channels.items() if not other.has_ended}
            self._channels[engine] = engine.open_channel(partial(self._take, engine))
        return self._channels[engine]

    def _take(
        self, engine: RemoteEngine, step: bytes, ended: Sequence[engine_pb2.SequenceEnd], alone: Sequence[int]
    ) -> None:
        """Passes a step on to the transformer, ends the sequences that it ends, and notes those that run isolated."""
        self._isolated += ((engine, number) for number in alone)
        self._put(step)
        for end in ended:
            error = None
            if end.error:
                error = read_error(steps_pb2.StepsError(class_name=end.error, message="the sequence failed"))
            if (found := self._forget(end.sequence.number)) is not None:
                found[1].end(error, end.tokens)

    def _put(self, step: bytes) -> None:
        """Adds a serialized step to the next message."""
        if not self.connection.ended.done():
            self._pending.append(step)
            self.send_soon()

    def _is_over(self) -> bool:
        if self._pending or self._sequences:
            return False
        # Hand-over (`stopping`, no drain): the connection ends when it has no sequences. Drain: it stays open until the
        # drain has ended.
        return self._repository.is_drained or (self._stopping.is_set() and not self._repository.is_draining)

    def _message(self) -> bytes:
        """The message to send now; empty if there is none."""
        now = self._loop.time()
        parts, size = [], 0
        while self._pending and size < _MESSAGE_BYTES:
            parts.append(self._pending.popleft())
            size += len(parts[-1])
        if self._pending:
            self.send_soon()
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
        self.send_soon()

    def _beat(self) -> None:
        now = self._loop.time()
        if now - self._heard_at > _SILENCE_S:
            logger.warning("a transformer has sent nothing for %.0f s: its connection is aborted", _SILENCE_S)
            self.connection.abort()
            return
        left_s = self._sent_at + HEARTBEAT_S - now
        if left_s <= 0:
            self.send_soon()
        self._timer = self._loop.call_later(left_s if left_s > 0 else HEARTBEAT_S, self._beat)

    def _close(self, ended: asyncio.Future[None]) -> None:
        """Cancels every sequence."""
        if (error := ended.exception()) is not None:
            logger.warning("the connection of a transformer broke: %s", str(error) or type(error).__name__)
        self._repository.watchers.discard(self._models_changed)
        self._timer.cancel()
        if self._accepted is not None:
            self._accepted.cancel()
        self._pending.clear()
        for number in tuple(self._sequences):
            self._cancel(number)
        for engine, channel in self._channels.items():
            engine.close_channel(channel)
