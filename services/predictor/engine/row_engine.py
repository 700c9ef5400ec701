"""An engine that gives every running sequence one token in turn, one forward pass a row.

`_step` reads: schedule, run, sample, publish. All of it happens on one thread of the engine's own;
`submit` may be called by any. A row that raises fails alone. What escapes a step is the
engine's own death: every request ends with NotReadyError, and `died` raises so that the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from typing import Literal

import torch

from millrace.errors import DeadlineError, MillraceError, NotReadyError, RequestFailedError
from services.predictor.engine.interface import EngineDeadError, EngineLimits, EngineStatistics, GenerationRequest
from services.predictor.engine.runner import ModelRunner
from services.predictor.engine.sampler import sample
from services.predictor.engine.scheduler import Scheduler
from services.predictor.engine.sequence import Sequence
from services.predictor.engine.slot import MergingSlot

logger = logging.getLogger(__name__)


class RowEngine:
    """See the module. `end_ids` end a sequence; `name` is for logs and the thread."""

    def __init__(
        self, name: str, runner: ModelRunner, scheduler: Scheduler, limits: EngineLimits, end_ids: Iterable[int]
    ) -> None:
        self.limits = limits
        self.statistics = EngineStatistics()
        self._runner = runner
        self._scheduler = scheduler
        self._end_ids = frozenset(end_ids)
        self._changed = threading.Condition()  # Guards the scheduler; notified of new work and of the stop.
        self._closing = False
        self._dead = threading.Event()
        self._mean_request_s = 1.0
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> MergingSlot:
        slot = MergingSlot(request.sampling)
        sequence = Sequence(request, slot, self._end_ids)
        with self._changed:
            if self._closing or self._dead.is_set():
                raise NotReadyError("the engine is stopping")
            self._scheduler.add(sequence, retry_after_ms=int(self._mean_request_s * 1000))
            self._changed.notify()
        return slot

    async def died(self) -> None:
        while self._closing or not self._dead.is_set():  # noqa: ASYNC110  # a thread's event cannot be awaited
            await asyncio.sleep(0.2)
        raise EngineDeadError(f"{self._thread.name} died")

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            # Inference mode belongs to a thread.
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except BaseException:
            in_flight = [sequence.request.id for sequence in self._scheduler.sequences]
            logger.critical("the engine died; in flight: %s", in_flight, exc_info=True)
        finally:
            self._dead.set()
            for sequence in self._sequences():
                self._fail(sequence, NotReadyError("the engine stopped"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._scheduler.sequences or self._closing):
                self._changed.wait()
            return not self._closing

    def _step(self) -> None:
        for sequence in self._schedule():
            try:
                logits = self._runner.logits(sequence)
                sampled = sample(logits[None], [sequence.row])
            except Exception:
                logger.exception("request %s failed in the model", sequence.request.id)
                self._fail(sequence, RequestFailedError("the model failed on this request"))
            else:
                self._publish(sequence, sampled.token_ids[0], sampled.logprobs[0])

    def _schedule(self) -> list[Sequence]:
        """The rows of this step, without those that are cancelled or out of time."""
        now = time.monotonic()
        for sequence in self._sequences():
            if sequence.slot.cancelled:
                self._cancel(sequence)
            elif sequence.expired(now):
                self._fail(sequence, DeadlineError("the deadline passed during generation"))
        with self._changed:
            for sequence in self._scheduler.admit():
                sequence.started_at = now
            rows = list(self._scheduler.running)
        self.statistics.steps += bool(rows)
        return rows

    def _publish(self, sequence: Sequence, token_id: int, logprob: float | None) -> None:
        reason = sequence.append(token_id)
        self.statistics.tokens += 1
        if reason is None:
            sequence.slot.publish(token_id, logprob)
        else:
            self._release(sequence, "succeeded")
            sequence.slot.publish(token_id, logprob, (reason, sequence.usage))

    def _fail(self, sequence: Sequence, error: MillraceError) -> None:
        self._release(sequence, "failed")
        sequence.slot.fail(error)

    def _cancel(self, sequence: Sequence) -> None:
        self._release(sequence, "cancelled")
        sequence.slot.fail(RequestFailedError("the request was cancelled"))

    def _release(self, sequence: Sequence, outcome: Literal["succeeded", "failed", "cancelled"]) -> None:
        """Frees what a sequence held and counts it, before its reader learns that it ended."""
        with self._changed:
            self._scheduler.remove(sequence)
        sequence.cache = None
        statistics, now = self.statistics, time.monotonic()
        started = sequence.started_at or now
        statistics.queue_ns += int((started - sequence.submitted_at) * 1e9)
        statistics.compute_ns += int((now - started) * 1e9)
        statistics.request_ns += int((now - sequence.submitted_at) * 1e9)
        statistics.last_inference_ms = int(time.time() * 1000)
        setattr(statistics, outcome, getattr(statistics, outcome) + 1)
        if outcome == "succeeded":
            self._mean_request_s += 0.1 * (now - started - self._mean_request_s)

    def _sequences(self) -> list[Sequence]:
        with self._changed:
            return self._scheduler.sequences
