"""The engine's side of the frames: what a step produces for all sequences becomes one frame.

`StepFrames` collects; its `flush` sends one frame with everything since the last one, grouped by channel, each group as
a serialized headrace.v1.Step. Thread-safe: the engine's thread publishes and flushes, the thread that reads commands
adds sequences and cancels them, and a third one flushes when nothing else does.
"""

import threading
import time
from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.frames import write_error
from headrace.oip.prompt_scores import PromptLogprobs
from headrace_predictor.engine.interface import Logprobs, Timeline, Usage
from headrace_protos import engine_pb2, headrace_pb2, steps_pb2

_STATE_S = 0.05  # The least time between two reports of the engine's state, unless a sequence ends.

Key = tuple[int, int]  # Channel, number.


class StepFrames:
    """See the module. `send` takes a frame; it may wait for the socket."""

    def __init__(self, send: Callable[[engine_pb2.EngineFrame], None]) -> None:
        self.lock = threading.Lock()
        self.sequences: dict[Key, SequenceFrames] = {}  # Those that have not ended.
        self._send = send
        self._sending = threading.Lock()
        self.frame = engine_pb2.EngineFrame()  # The rest of what is collected; who uses it holds the lock.
        self._steps: dict[int, _Step] = {}
        self._state: Callable[[], engine_pb2.EngineState] | None = None
        self._state_sent_at = 0.0

    def report(self, state: Callable[[], engine_pb2.EngineState]) -> None:
        """Sends the engine's state with the frames from now on."""
        self._state = state

    def add(self, key: Key) -> "SequenceFrames":
        sequence = self.sequences[key] = SequenceFrames(self, key)
        return sequence

    def flush(self) -> None:
        """Sends what has been collected, if anything."""
        with self._sending:
            with self.lock:
                frame, steps = self.frame, self._steps
                if not (steps or frame.started):
                    return
                self.frame, self._steps = engine_pb2.EngineFrame(), {}
            for channel, step in steps.items():
                frame.steps.add(channel=channel, step=step.message().SerializeToString())
            if frame.ended or time.monotonic() - self._state_sent_at >= _STATE_S:
                self._add_state(frame)
            self._send(frame)

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        """Sends a frame of its own."""
        with self._sending:
            self._send(frame)

    def send_state(self, interval_s: float) -> None:
        """Sends the engine's state, unless a frame had it within the interval."""
        with self._sending:
            if time.monotonic() - self._state_sent_at >= interval_s:
                frame = engine_pb2.EngineFrame()
                self._add_state(frame)
                self._send(frame)

    def step_of(self, channel: int) -> "_Step":
        """What is collected for a channel; the caller holds the lock."""
        step = self._steps.get(channel)
        if step is None:
            step = self._steps[channel] = _Step()
        return step

    def _add_state(self, frame: engine_pb2.EngineFrame) -> None:
        if self._state is not None:
            frame.state.CopyFrom(self._state())
            self._state_sent_at = time.monotonic()


class _Step:
    """A headrace.v1.Step under construction: lists, which become fields at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.token_ids: list[int] = []
        self.seconds: list[float] = []
        self.rest = steps_pb2.Step()

    def message(self) -> steps_pb2.Step:
        self.rest.numbers.extend(self.numbers)
        self.rest.token_ids.extend(self.token_ids)
        self.rest.seconds.extend(self.seconds)
        return self.rest


class SequenceFrames:
    """A SequenceOutput whose tokens go into the frames."""

    def __init__(self, frames: StepFrames, key: Key) -> None:
        self.timeline = Timeline()
        self.cancelled = False
        self._frames = frames
        self._key = key
        self._cached_tokens = 0
        self._tokens = 0
        self._ended = False
        self._reported = threading.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._reported.set()

    def reported(self) -> None:
        """The caller has been notified that the sequence runs isolated."""
        self._reported.set()

    def start(self, now: float, cached_tokens: int) -> None:
        self.timeline.started = now
        self._cached_tokens = cached_tokens
        with self._frames.lock:
            self._frames.frame.started.add(sequence=self._message(), at=now)

    def run_alone(self, timeout_s: float) -> bool:
        channel, number = self._key
        with self._frames.lock:
            self._frames.step_of(channel).rest.alone.append(number)
            self._frames.frame.alone.append(self._message())
        self._frames.flush()
        self._reported.wait(timeout_s)
        return not (self.cancelled or self._ended)

    def publish(
        self,
        token_id: int,
        logprobs: Logprobs | None,
        finish: tuple[str, Usage] | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        channel, number = self._key
        with self._frames.lock:
            if self._ended:
                return
            step = self._frames.step_of(channel)
            step.numbers.append(number)
            step.token_ids.append(token_id)
            step.seconds.append(self.timeline.engine_s)
            if not self._tokens:
                self._begin(step.rest, prompt)
            self._tokens += 1
            if logprobs is not None:
                top_ids = [token for token, _ in logprobs.top]
                top = [value for _, value in logprobs.top]
                step.rest.logprobs.add(number=number, chosen=logprobs.chosen, top_ids=top_ids, top=top)
            if finish is not None:
                self._finish(*finish)

    def finish(self, reason: str, usage: Usage) -> None:
        with self._frames.lock:
            if not self._ended:
                self._finish(reason, usage)

    def fail(self, error: HeadraceError, refused: bool = False) -> None:
        """`refused`: the engine has not queued the sequence."""
        channel, number = self._key
        with self._frames.lock:
            if not self._ended:
                self._frames.step_of(channel).rest.ended.add(number=number, error=write_error(error, "predictor"))
                self._end(type(error).__name__, refused)

    def _begin(self, step: steps_pb2.Step, prompt: PromptLogprobs | None) -> None:
        begun = step.begun.add(number=self._key[1], cached_tokens=self._cached_tokens)
        if prompt is not None:
            begun.prompt.CopyFrom(prompt.message())
        at = self.timeline.first_token
        self._frames.frame.first_tokens.add(sequence=self._message(), at=time.monotonic() if at is None else at)

    def _finish(self, reason: str, usage: Usage) -> None:
        channel, number = self._key
        message = headrace_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self._frames.step_of(channel).rest.ended.add(number=number, finish_reason=reason, usage=message)
        self._end()

    def _end(self, error: str = "", refused: bool = False) -> None:
        self._ended = True
        self._reported.set()
        self._frames.sequences.pop(self._key, None)
        self._frames.frame.ended.add(
            sequence=self._message(),
            refused=refused,
            at=self.timeline.ended,
            preemptions=self.timeline.preemptions,
            preempted_at=self.timeline.preempted,
            tokens=self._tokens,
            error=error,
        )

    def _message(self) -> engine_pb2.SequenceKey:
        channel, number = self._key
        return engine_pb2.SequenceKey(channel=channel, number=number)
