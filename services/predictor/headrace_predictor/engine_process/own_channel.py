"""The front's own channel: hands the tokens of an engine process to merging slots, one for each request.

Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.oip.prompt_scores import read_prompt
from headrace.step_messages import read_error
from headrace_predictor.engine.interface import Logprobs, Usage
from headrace_predictor.engine.state.slot import MergingSlot, Reader, wake
from headrace_protos import engine_pb2, steps_pb2


class OwnChannel:
    """A StepSink that feeds `slots`, by number, each with its number of scores; none of them runs isolated."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[MergingSlot, int]] = {}

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
            if (known := self.slots.get(number)) is None:
                continue  # Its caller has left.
            slot, top = known
            beginning, prompt = begun.get(number), None
            if beginning is not None and beginning.HasField("prompt"):
                prompt = read_prompt(beginning.prompt, top)
            readers.append(slot.publish(token_id, position, None, prompt))
        wake(reader for reader in readers if reader is not None)
        for end in message.ended:
            if (known := self.slots.pop(end.number, None)) is None:
                continue
            if end.HasField("error"):
                known[0].fail(read_error(end.error))
            else:
                usage = Usage(end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens)
                known[0].finish(end.finish_reason, usage)
