"""The engine: continuous batching on one thread of its own, which no request can break.

`_step` reads: schedule, run, sample, publish. A step that raises is replayed row by row, so that only
the culprit fails (what a step writes is indexed by position: it can be run again). Where every row
fails and a probe of the model fails too, or the device reports an error of its own, or a step takes
longer than `step_timeout_s`, the engine is dead: every request ends with NotReadyError and `died`
raises, so that the process ends and is started again.

Threads: `submit`, a slot's `cancel`, `close` and `statistics` may be used by any; all else is the
engine thread's. A second thread, the watchdog, looks at the first.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import threading
import time
from collections.abc import Iterable

import torch

from millrace.errors import DeadlineError, MillraceError, NotReadyError, RequestFailedError
from services.predictor.counts import Outcome
from services.predictor.engine.faults import is_device_error, is_out_of_memory
from services.predictor.engine.interface import (
    EngineDeadError,
    EngineLimits,
    EngineStatistics,
    GenerationRequest,
    Logprobs,
)
from services.predictor.engine.pace import PrefillPace
from services.predictor.engine.runner import ModelRunner
from services.predictor.engine.sampler import NO_TOKEN, sample
from services.predictor.engine.scheduler import Scheduler
from services.predictor.engine.sequence import Row, Sequence
from services.predictor.engine.slot import MergingSlot, Reader, wake

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_Result = tuple[Row, int, Logprobs | None]


class ContinuousBatchingEngine:
    """See the module. `end_ids` end a sequence; `name` is for logs and threads."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        scheduler: Scheduler,
        limits: EngineLimits,
        end_ids: Iterable[int],
        step_timeout_s: float,
    ) -> None:
        self.limits = limits
        self.statistics = EngineStatistics()
        self.description = {"runner": runner.description}
        self._runner = runner
        self._scheduler = scheduler
        self._pace = PrefillPace()
        self._end_ids = frozenset(end_ids)
        self._changed = threading.Condition()  # Guards the scheduler; notified of new work and of the stop.
        self._closing = False
        self._dead = threading.Event()
        self._step_timeout_s = step_timeout_s
        self._step_started: float | None = None
        self._end_interval_s = 1.0  # Between the ends of two requests, smoothed.
        self._last_end: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name=f"watchdog-{name}", daemon=True)
        self._thread.start()
        self._watchdog.start()

    @property
    def blocks_in_use(self) -> float:
        """The share of the cache's blocks that running sequences hold."""
        blocks = self._scheduler.blocks
        return 1 - blocks.free / blocks.total

    def submit(self, request: GenerationRequest) -> MergingSlot:
        slot = MergingSlot(request.sampling)
        sequence = Sequence(request, slot, self._end_ids, self._runner.start_ids)
        with self._changed:
            if self._closing or self._dead.is_set():
                raise NotReadyError("the engine is stopping")
            # A place in the queue is free when the next request ends.
            self._scheduler.add(sequence, retry_after_ms=max(1, int(self._end_interval_s * 1000)))
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
        self._thread.join(_STOP_TIMEOUT_S)
        # The thread has done so, unless its step hangs.
        self._end_all()
        self._watchdog.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            # Inference mode belongs to a thread.
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step_started = time.monotonic()
                    self._step()
                    self._step_started = None
        except BaseException:
            logger.critical("the engine died; in flight: %s", self._ids_in_flight(), exc_info=True)
        finally:
            self._end_all()

    def _watch(self) -> None:
        """Declares the engine dead when a step takes too long; the step itself cannot be stopped."""
        while not self._dead.wait(min(1.0, self._step_timeout_s / 4)):
            started = self._step_started
            if started is not None and time.monotonic() - started > self._step_timeout_s:
                in_flight = self._ids_in_flight()
                logger.critical("a step takes longer than %g s; in flight: %s", self._step_timeout_s, in_flight)
                try:
                    faulthandler.dump_traceback(all_threads=True)
                except (RuntimeError, ValueError, OSError) as error:
                    logger.warning("standard error takes no traceback: %s", error)
                self._end_all()

    def _end_all(self) -> None:
        self._dead.set()
        for sequence in self._sequences():
            sequence.slot.fail(NotReadyError("the engine stopped"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._scheduler.sequences or self._closing or self._dead.is_set()):
                self._scheduler.restore()
                # Idle time says nothing of how fast requests end.
                self._last_end = None
                self._changed.wait()
            return not (self._closing or self._dead.is_set())

    def _step(self) -> None:
        rows = self._schedule()
        if rows:
            started = time.perf_counter()
            results = self._run_and_sample(rows)
            self._publish(results)
            self._scheduler.regain()
            elapsed = time.perf_counter() - started
            streams = sum(row.count == 1 for row in rows)
            self._pace.observe(streams, sum(row.count for row in rows) - streams, elapsed)
            self.statistics.steps += 1
            self.statistics.step_ns += int(elapsed * 1e9)

    def _schedule(self) -> list[Row]:
        """The rows of this step, without those that are cancelled or out of time."""
        now = time.monotonic()
        for sequence in self._sequences():
            if sequence.slot.cancelled:
                self._cancel(sequence)
            elif sequence.expired(now):
                self._fail(sequence, DeadlineError("the deadline passed during generation"))
        with self._changed:
            streams, prompts = self._scheduler.streams, self._scheduler.prompts
            rows = self._scheduler.schedule(self._pace.limit(streams, prompts) if prompts else 0)
            self.statistics.preempted = self._scheduler.preempted
        for row in rows:
            if row.sequence.started_at is None:
                row.sequence.started_at = now
                self.statistics.cached_tokens += row.sequence.cached_tokens
        return rows

    def _run_and_sample(self, rows: list[Row]) -> list[_Result]:
        try:
            return self._try(rows)
        except Exception as error:
            if is_device_error(error):
                raise EngineDeadError("the device failed") from error
            if is_out_of_memory(error):
                return self._make_room(rows, error)
            return self._replay(rows, error)

    def _try(self, rows: list[Row]) -> list[_Result]:
        started = time.perf_counter_ns()
        logits = self._runner.run(rows)
        self.statistics.forward_ns += time.perf_counter_ns() - started
        sampling = [row for row in rows if row.samples]
        results: list[_Result] = [(row, NO_TOKEN, None) for row in rows if not row.samples]
        if sampling:
            sampled = sample(logits, [row.sequence.row for row in sampling])
            results += zip(sampling, sampled.token_ids, sampled.logprobs, strict=True)
        return results

    def _replay(self, rows: list[Row], error: Exception) -> list[_Result]:
        """Runs each row alone, so that only what is at fault fails."""
        results: list[_Result] = []
        failed: list[Sequence] = []
        for row in rows:
            self._step_started = time.monotonic()  # Each has a step's time.
            try:
                results += self._try([row]) if len(rows) > 1 else _raise(error)
            except Exception as own:
                if is_device_error(own):
                    raise EngineDeadError("the device failed") from own
                if is_out_of_memory(own):
                    results += self._make_room([row], own)
                    continue
                logger.exception("request %s failed in the model", row.sequence.request.id)
                failed.append(row.sequence)
        if failed and not results:
            # Was it the requests, or is it the model? What cannot run the simplest input cannot go on, and
            # then the requests are to blame for nothing: they end as all others do, and may go on elsewhere.
            self._runner.probe()
        for sequence in failed:
            self._fail(sequence, RequestFailedError("the model failed on this request"), forget=True)
        return results

    def _make_room(self, rows: list[Row], error: Exception) -> list[_Result]:
        """After an allocation that failed: smaller steps, then fewer sequences, then one request less."""
        with self._changed:
            alone = self._scheduler.make_room(rows)
        if alone is None:
            steps, running = self._scheduler.step_tokens, self._scheduler.max_running
            logger.warning("out of memory: steps of %d tokens and %d sequences from now on", steps, running)
        else:
            logger.error("out of memory on request %s alone", alone.request.id, exc_info=error)
            self._fail(alone, RequestFailedError("there is not enough memory for this request"), forget=True)
        return []

    def _publish(self, results: list[_Result]) -> None:
        readers: list[Reader] = []
        try:
            for row, token_id, logprobs in results:
                self._scheduler.complete(row)
                if row.samples:
                    reader = self._publish_token(row.sequence, token_id, logprobs)
                    if reader is not None:
                        readers.append(reader)
        finally:
            # Nobody else wakes them, even if a later row is the engine's end.
            wake(readers)

    def _publish_token(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> Reader | None:
        """Hands a sequence its next token; the reader that has to be woken."""
        if token_id == NO_TOKEN:
            logger.error("request %s: the model's logits are not numbers", sequence.request.id)
            self._fail(sequence, RequestFailedError("the model failed on this request"), forget=True)
            return None
        reason = sequence.append(token_id)
        self.statistics.tokens += 1
        self.statistics.tokens_after_cancel += sequence.slot.cancelled
        finish = None
        if reason is not None:
            self._release(sequence, "succeeded")
            finish = reason, sequence.usage
        return sequence.slot.publish(token_id, logprobs, finish)

    def _fail(self, sequence: Sequence, error: MillraceError, forget: bool = False) -> None:
        self._end(sequence, "failed", error, forget)

    def _cancel(self, sequence: Sequence) -> None:
        self._end(sequence, "cancelled", RequestFailedError("the request was cancelled"))

    def _end(self, sequence: Sequence, outcome: Outcome, error: MillraceError, forget: bool = False) -> None:
        void = self._release(sequence, outcome, forget)
        # First, since clearing may fail where the device has.
        sequence.slot.fail(error)
        if forget or not sequence.proven:
            self._runner.clear(void)

    def _release(self, sequence: Sequence, outcome: Outcome, forget: bool = False) -> list[int]:
        """Frees what a sequence held and counts it, before its reader learns that it ended; the void blocks."""
        with self._changed:
            released = self._scheduler.remove(sequence, forget)
        now = time.monotonic()
        self.statistics.add(outcome, sequence.submitted_at, sequence.started_at or now, now)
        if self._last_end is not None:
            self._end_interval_s += 0.1 * (min(now - self._last_end, 60.0) - self._end_interval_s)
        self._last_end = now
        return released

    def _sequences(self) -> list[Sequence]:
        with self._changed:
            return self._scheduler.sequences

    def _ids_in_flight(self) -> list[str]:
        return [sequence.request.id for sequence in self._sequences()]


def _raise(error: Exception) -> list[_Result]:
    raise error
