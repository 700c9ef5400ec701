"""The front's own channel: hands the tokens of an engine process to merging slots, one for each request.

Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.oip.prompt_logprobs import PromptLogprobs
from headrace.step_errors import read_error
from headrace_predictor.engine.interface import GenerationRequest, Logprobs, Usage
from headrace_predictor.engine.state.slot import MergingSlot, Reader, wake
from headrace_protos import engine_pb2, steps_pb2


class RemoteSlot(MergingSlot):
    """The output of a request that an engine process computes."""

    def __init__(self, request: GenerationRequest, cancel: Callable[[], None]) -> None:
        super().__init__(request.sampling)
        self.top_prompt_logprobs = request.prompt_logprobs
        self._cancel_remote = cancel

    def cancel(self) -> None:
        super().cancel()
        self._cancel_remote()


class OwnChannel:
    """A StepSink that feeds slots; none of its requests runs isolated."""

    def __init__(self) -> None:
        self._slots: dict[int, RemoteSlot] = {}

    def add(self, number: int, slot: RemoteSlot) -> None:
        self._slots[number] = slot

    def remove(self, number: int) -> None:
        self._slots.pop(number, None)

    def take(self, step: bytes, ended: Sequence[engine_pb2.SequenceEnd], alone: Sequence[int]) -> None:
        message = steps_pb2.Step.FromString(step)
        begun = {each.number: each for each in message.begun}
        logprobs = iter(message.logprobs)
        scored = next(logprobs, None)
        readers: list[Reader | None] = []
        for number, token_id in zip(message.numbers, message.token_ids, strict=True):
            position = None
            if scored is not None and scored.number == number:
                position = Logprobs(scored.chosen, list(zip(scored.top_ids, scored.top, strict=True)))
                scored = next(logprobs, None)
            slot = self._slots.get(number)
            if slot is None:
                continue  # Its caller has left.
            beginning, prompt = begun.get(number), None
            if beginning is not None and beginning.HasField("prompt"):
                prompt = _prompt(beginning.prompt, slot.top_prompt_logprobs or 0)
            readers.append(slot.publish(token_id, position, None, prompt))
        wake(reader for reader in readers if reader is not None)
        for end in message.ended:
            slot = self._slots.pop(end.number, None)
            if slot is None:
                continue
            if end.HasField("error"):
                slot.fail(read_error(end.error))
            else:
                usage = end.usage
                slot.finish(end.finish_reason, Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens))


def _prompt(scores: steps_pb2.PromptScores, top: int) -> PromptLogprobs:
    positions = len(scores.chosen)
    return PromptLogprobs(
        np.array(scores.chosen, np.float32),
        np.array(scores.top_ids, np.int32).reshape(positions, top),
        np.array(scores.top, np.float32).reshape(positions, top),
    )
