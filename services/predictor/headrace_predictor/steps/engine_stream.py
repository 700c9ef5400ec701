"""The sequences of a session at one engine: begins and ends them, and passes the engine's steps on unparsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.step_messages import error_named, write_error
from headrace_predictor.engine_process.remote_engine import RemoteEngine
from headrace_predictor.steps.sequence import StepsSequence
from headrace_protos import engine_pb2, steps_pb2

if TYPE_CHECKING:
    from headrace_predictor.steps.session import TransformerSession


class EngineStream:
    """See the module; a StepSink. Owned by the event loop."""

    def __init__(self, session: TransformerSession, engine: RemoteEngine) -> None:
        self.engine = engine
        self.channel = engine.open_channel(self)
        self._session = session
        self._sequences: dict[int, StepsSequence] = {}
        self._is_closing = False

    def begin(self, number: int, sequence: StepsSequence, submission: bytes) -> None:
        self.engine.generate(self.channel, number, submission, sequence.timeline)
        self._sequences[number] = sequence
        sequence.begin()

    def take(self, step: bytes, ended: Sequence[engine_pb2.SequenceEnd], alone: Sequence[int]) -> None:
        """Passes a step on to the transformer, ends the sequences that it ends, and notes those that run isolated."""
        for number in alone:
            self._session.announce_isolated(self, number)
        self._session.put(step)
        for end in ended:
            error = error_named(end.error, "the sequence failed") if end.error else None
            self._end(end.sequence.number, error, end.tokens)

    def cancel(self, number: int) -> None:
        """Ends a sequence for its caller at once; the engine may still finish its current step."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            self.engine.cancel(self.channel, number)
            self._session.forget(number)
            sequence.cancel()

    def hand_back(self, number: int, error: HeadraceError) -> None:
        """Ends a sequence with `error`, at the engine and towards the transformer."""
        self.engine.end(self.channel, number)
        ended = steps_pb2.Ended(number=number, error=write_error(error, "predictor"))
        self._session.put(steps_pb2.Step(ended=[ended]).SerializeToString())
        self._end(number, error, 0)

    def close(self) -> None:
        """Cancels every sequence and closes the channel at the engine."""
        self._is_closing = True
        for number in tuple(self._sequences):
            self.cancel(number)
        self._leave()

    def _end(self, number: int, error: HeadraceError | None, tokens: int) -> None:
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            self._session.forget(number)
            sequence.end(error, tokens)
        self._leave()

    def _leave(self) -> None:
        if self._is_closing and not self._sequences:
            self.engine.close_channel(self.channel)
