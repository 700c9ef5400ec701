"""An engine in a process of its own, as the front sees it.

Owned by the event loop; `load`, `statistics` and `close` are for any thread. The process ends when its socket closes,
and the front takes the end of the socket for the end of the process. Then every sequence in flight ends, with
HopBrokenError if it had started, because it may be to blame, else with NotReadyError. A process that sends nothing for
`silence_s` is killed.

The front's own channel hands the tokens to merging slots, one for each request.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import count
from pathlib import Path

from headrace.errors import HeadraceError, HopBrokenError, NotReadyError, OverloadedError, StartupFault
from headrace.frames import FrameConnection, read_error, write_error
from headrace.oip.prompt_scores import read_prompt
from headrace_predictor.engine.interface import (
    EngineLimits,
    EngineLoad,
    EngineProcessError,
    EngineStatistics,
    Logprobs,
    Timeline,
    Usage,
    sampling_of,
)
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.engine_process.remote_adapters import RemoteAdapters
from headrace_predictor.engine_process.step_frames import Key
from headrace_protos import engine_pb2, steps_pb2

logger = logging.getLogger(__name__)

_OWN_CHANNEL = 0
_NUMBERS = 1 << 32  # Then they begin again.
_STOP_S = 5.0  # For the process to end by itself, then again after SIGKILL.
_LOOK_S = 1.0
_MAX_UNSENT_BYTES = 64 * 1024 * 1024


# Takes a channel's serialized headrace.v1.Step, which sequences it ends, and which run isolated from now on.
StepSink = Callable[[bytes, Sequence[engine_pb2.SequenceEnd], Sequence[int]], None]


class OwnChannel:
    """Feeds `slots`, by number, each with its number of scores; none of them runs isolated."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[MergingSlot, int]] = {}

    def take(self, step: bytes, ended: Sequence[engine_pb2.SequenceEnd], alone: Sequence[int]) -> None:
        message = steps_pb2.Step.FromString(step)
        begun = {each.number: each for each in message.begun}
        logprobs = iter(message.logprobs)
        scored = next(logprobs, None)
        for number, token_id in zip(message.numbers, message.token_ids, strict=True):
            position = None
            if scored is not None and scored.number == number:
                position = Logprobs(scored.chosen, list(zip(scored.top_ids, scored.top, strict=True)))
                scored = next(logprobs, None)
            if (known := self.slots.get(number)) is None:
                continue  # Its caller has left.
            slot, top = known
            beginning, prompt = begun.get(number), None
            if beginning is not None and beginning.HasField("prompt"):
                prompt = read_prompt(beginning.prompt, top)
            slot.publish(token_id, position, None, prompt)
        for end in message.ended:
            if (known := self.slots.pop(end.number, None)) is None:
                continue
            if end.HasField("error"):
                known[0].fail(read_error(end.error))
            else:
                usage = Usage(end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens)
                known[0].finish(end.finish_reason, usage)


class RemoteEngine:
    """An Engine; see the module.

    `submit` raises NotReadyError when the engine is stopping or has ended, and OverloadedError while its connection is
    full; a refusal by the engine itself is the slot's error.
    """

    def __init__(
        self, name: str, pid: int, connection: FrameConnection, facts: engine_pb2.EngineFacts, silence_s: float
    ) -> None:
        self.pid = pid
        self.limits = EngineLimits(
            facts.context_length,
            facts.is_encoder_decoder,
            facts.vocabulary_size,
            facts.scores_prompts,
        ).with_defaults(facts.description)
        self.description = dict(facts.description)
        self.statistics = EngineStatistics()
        self._name = name
        self._connection = connection
        self._silence_s = silence_s
        self.load = EngineLoad()  # As of the latest report; of no sequences once the process has ended.
        self._own = OwnChannel()
        self._sinks: dict[int, StepSink] = {_OWN_CHANNEL: self._own.take}
        self._channels, self._numbers = count(1), count(1)
        self._in_flight: dict[Key, Timeline] = {}
        self._adapters = RemoteAdapters(self._command)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closing = False
        self._ended = threading.Event()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._silent_s, self._looked_at, self._frames_seen = 0.0, time.monotonic(), 0
        self._look: asyncio.TimerHandle | None = self._loop.call_later(_LOOK_S, self._look_for_silence)
        connection.receive = self._receive
        connection.ended.add_done_callback(self._lost)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def submit(self, submission: steps_pb2.Submission) -> MergingSlot:
        submission.channel, submission.number = _OWN_CHANNEL, next(self._numbers) % _NUMBERS
        key = submission.channel, submission.number

        def cancel() -> None:
            self._own.slots.pop(key[1], None)
            self.cancel(*key)

        slot = MergingSlot(sampling_of(submission), cancel)
        self.generate(*key, submission.SerializeToString(), slot.timeline)
        self._own.slots[key[1]] = slot, submission.prompt_logprobs
        return slot

    def open_channel(self, sink: StepSink) -> int:
        """Returns the number of a new channel, whose steps go to the sink."""
        channel = next(self._channels)
        self._sinks[channel] = sink
        return channel

    def close_channel(self, channel: int) -> None:
        """Forgets a channel whose sequences have ended."""
        self._sinks.pop(channel, None)

    def generate(self, channel: int, number: int, submission: bytes, timeline: Timeline) -> None:
        """Passes on a serialized Submission, which has the channel and the number; its timeline gets its events."""
        if self._closing or self._ended.is_set():
            raise NotReadyError("the engine is stopping")
        if self._connection.unsent_bytes > _MAX_UNSENT_BYTES:
            raise OverloadedError("the engine takes no requests", retry_after_ms=1000)
        timeline.submitted = time.monotonic()
        self._in_flight[channel, number] = timeline
        self._command(engine_pb2.EngineCommands(submissions=[submission]))

    def cancel(self, channel: int, number: int) -> None:
        """Ends a sequence, if it has not ended; nothing comes of it any more."""
        if self._in_flight.pop((channel, number), None) is not None:
            self._command(engine_pb2.EngineCommands(cancelled=[_message((channel, number))]))

    def end(self, channel: int, number: int) -> None:
        """Asks the engine to end a sequence; its sink takes the end."""
        if (channel, number) in self._in_flight:
            self._command(engine_pb2.EngineCommands(cancelled=[_message((channel, number))]))

    def report_alone(self, channel: int, number: int) -> None:
        """Confirms that the caller of a sequence has been notified that it runs isolated."""
        if (channel, number) in self._in_flight:
            self._command(engine_pb2.EngineCommands(reported=[_message((channel, number))]))

    async def load_adapter(self, name: str, folder: Path, is_local: bool) -> tuple[int, str]:
        """Loads an adapter of the model; returns its number and the fingerprint of both; raises StartupError."""
        if self._closing or self._ended.is_set():
            raise StartupFault(f"model {name}: the engine of its base is stopping")
        return await self._adapters.load(name, folder, is_local)

    def unload_adapter(self, number: int) -> None:
        """Forgets an adapter, except for sequences in flight; on any thread."""
        with suppress(RuntimeError):  # The loop has ended, and so will the engine.
            self._loop.call_soon_threadsafe(self._adapters.unload, number)

    async def died(self) -> None:
        await asyncio.shield(self._died)
        raise EngineProcessError(f"the engine of model {self._name} died")

    def close(self) -> None:
        self._closing = True
        if threading.get_ident() == self._thread:
            self.kill()
            return
        self._loop.call_soon_threadsafe(self._connection.end)
        if not self._ended.wait(_STOP_S):
            logger.warning("model %s: the engine process does not end and is killed", self._name)
            self.kill()
            self._ended.wait(_STOP_S)

    def kill(self) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _command(self, commands: engine_pb2.EngineCommands) -> None:
        self._connection.send(commands.SerializeToString())

    def _receive(self, message: bytes) -> None:
        frame = engine_pb2.EngineFrame.FromString(message)
        if frame.HasField("state"):
            self.load = EngineLoad(**{field.name: getattr(frame.state, field.name) for field in fields(EngineLoad)})
            for field, value in frame.state.counters.ListFields():
                setattr(self.statistics, field.name, value)
        for loaded in frame.adapters:
            self._adapters.take(loaded)
        for each in frame.started:
            if (timeline := self._in_flight.get(_key(each.sequence))) is not None:
                timeline.started = each.at
        for each in frame.first_tokens:
            if (timeline := self._in_flight.get(_key(each.sequence))) is not None:
                timeline.first_token = each.at
        ended: dict[int, list[engine_pb2.SequenceEnd]] = defaultdict(list)
        for end in frame.ended:
            timeline = self._in_flight.pop(_key(end.sequence), None)
            if timeline is not None:
                _end(timeline, end)
                ended[end.sequence.channel].append(end)
        for step in frame.steps:
            if (sink := self._sinks.get(step.channel)) is not None:
                alone = [key.number for key in frame.alone if key.channel == step.channel]
                sink(step.step, ended[step.channel], alone)

    def _lost(self, ended: asyncio.Future[None]) -> None:
        """The socket has closed, and so the process has ended."""
        if (failure := ended.exception()) is not None and not isinstance(failure, OSError):
            logger.critical("an engine's frame cannot be read", exc_info=failure)
        self._ended.set()
        if self._look is not None:
            self._look.cancel()
        self.load = EngineLoad()
        self._adapters.lost()
        lost: dict[int, list[engine_pb2.SequenceEnd]] = defaultdict(list)
        steps: dict[int, steps_pb2.Step] = defaultdict(steps_pb2.Step)
        for (channel, number), timeline in self._in_flight.items():
            error: HeadraceError = NotReadyError("the engine stopped")
            if timeline.started is not None and not self._closing:
                error = HopBrokenError("the engine died")
            steps[channel].ended.add(number=number, error=write_error(error, "predictor"))
            end = engine_pb2.SequenceEnd(sequence=_message((channel, number)), error=type(error).__name__)
            lost[channel].append(end)
        self._in_flight.clear()
        if lost and not self._closing:
            logger.error("model %s: the engine died with %d requests", self._name, sum(map(len, lost.values())))
        if not (self._closing or self._died.done()):
            self._died.set_result(None)  # First: who reads an error and asks again finds the model not ready.
        for channel, step in steps.items():
            if (sink := self._sinks.get(channel)) is not None:
                sink(step.SerializeToString(), lost[channel], ())

    def _look_for_silence(self) -> None:
        """Kills a process that hangs. Time counts by looks: a front that was stopped itself is as late."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, 2 * _LOOK_S)
        self._looked_at = now
        if self._connection.received != self._frames_seen:
            self._frames_seen, self._silent_s = self._connection.received, 0.0
        if self._silent_s > self._silence_s and not self._closing:
            logger.critical("model %s: the engine process has been silent for %.0f s", self._name, self._silent_s)
            self.kill()
        self._look = self._loop.call_later(_LOOK_S, self._look_for_silence)


def _end(timeline: Timeline, end: engine_pb2.SequenceEnd) -> None:
    if end.refused:
        timeline.submitted = 0.0
    if end.HasField("at"):
        timeline.ended = end.at
    timeline.preemptions, timeline.preempted = end.preemptions, tuple(end.preempted_at)


def _key(message: engine_pb2.SequenceKey) -> Key:
    return message.channel, message.number


def _message(key: Key) -> engine_pb2.SequenceKey:
    return engine_pb2.SequenceKey(channel=key[0], number=key[1])
