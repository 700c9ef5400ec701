"""Requests to an engine of this process; the predictor's engines have processes of their own."""

import asyncio
from functools import lru_cache, partial
from typing import Any

from headrace.errors import HeadraceError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.interface import Usage, sampling_of
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.tensor_models.loop_thread import Mailbox
from headrace_protos.steps_pb2 import Submission

_mailbox_of = lru_cache(maxsize=1)(Mailbox)  # All tokens of a step wake the event loop once.


class _PostedSlot(MergingSlot):
    """A slot whose output the engine's thread posts to the event loop that reads it."""

    def __init__(self, sampling: SamplingParameters, mailbox: Mailbox) -> None:
        super().__init__(sampling)
        self._mailbox = mailbox

    def publish(self, *output: Any) -> None:
        self._mailbox.post(partial(super().publish, *output))

    def finish(self, reason: str, usage: Usage) -> None:
        self._mailbox.post(partial(super().finish, reason, usage))

    def fail(self, error: HeadraceError) -> None:
        self._mailbox.post(partial(super().fail, error))


def submit(
    engine: ContinuousBatchingEngine, submission: Submission, loop: asyncio.AbstractEventLoop | None = None
) -> MergingSlot:
    """Queues a request; its slot is read on the event loop, by default the running one."""
    slot = _PostedSlot(sampling_of(submission), _mailbox_of(loop or asyncio.get_running_loop()))
    engine.generate(submission, slot)
    return slot


class InProcessEngine:
    """An engine of this process in place of one of its own, as GenerationModel uses it."""

    def __init__(self, engine: ContinuousBatchingEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, submission: Submission) -> MergingSlot:
        return submit(self._engine, submission)
