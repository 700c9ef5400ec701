"""The engine: continuous batching on its own thread; no request can break it.

`_step` schedules, runs, samples and publishes. A step that raises is replayed row by row, so that only the culprit
fails (a step writes at places given by positions, so it can be repeated). After a step in which every row failed, the
model is probed before the failure is reported: a real forward pass must succeed. The engine is dead if the probe fails,
if the device reports an error of its own, if a step takes longer than `step_timeout_s`, or if steps pass by a sequence
for that long which each of them should serve: every request ends with HopBrokenError and `wait_for_death` returns, so
that the engine's process ends and is replaced.

`flush` is called on the engine's thread after each step, and before it is computed if sequences start with it: outputs
that collect what a step produces send it then. The time that `flush` takes does not count as the step's.

Threads: `generate`, `wait_for_death`, `close`, `statistics` and `load` are for any thread; everything else belongs to
the engine's thread. A second thread, the watchdog, monitors it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count

import torch

from headrace.errors import HeadraceError, HopBrokenError, InvalidRequestError, NotReadyError
from headrace.grammars import PARAMETER
from headrace.models.generation_config import GenerationRules
from headrace.rpc.server.watchdog import Watchdog, dump_tracebacks
from headrace_predictor.engine.adapters import Adapter, Adapters
from headrace_predictor.engine.faults import Isolation
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.interface import (
    EngineDeadError,
    EngineLimits,
    EngineLoad,
    EngineStatistics,
)
from headrace_predictor.engine.load import LoadMeter, PrefillPace, ProgressWatch, QueueEstimate
from headrace_predictor.engine.lookup import PromptLookup
from headrace_predictor.engine.publisher import Publisher
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.sequence import Row, Sequence
from headrace_predictor.engine.state.slot import SequenceOutput
from headrace_predictor.engine.step import Outcome, StepRunner, is_plain, overlapped
from headrace_protos.steps_pb2 import Submission

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_NOTIFY_S = 0.5  # The longest wait for the notice to an isolated request's caller: it may crash its process.


class ContinuousBatchingEngine:
    """See the module. `end_ids` end a sequence; `name` is for logs and threads; without `grammars` it has none."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        scheduler: Scheduler,
        pace: PrefillPace,
        limits: EngineLimits,
        end_ids: Iterable[int],
        step_timeout_s: float,
        flush: Callable[[], None] = lambda: None,
        grammars: GrammarCompiler | None = None,
        lookup: PromptLookup | None = None,
        chooser: PagedRunner | None = None,  # The runner, where steps that decode overlap.
    ) -> None:
        self.limits = limits
        self.statistics = EngineStatistics()
        self.description = {"runner": runner.description}
        self.adapters: Adapters | None = None  # None: the runner supports none.
        self.rules: GenerationRules | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._pace = pace
        self._end_ids = frozenset(end_ids)
        self._changed = threading.Condition()  # Guards the scheduler; notified of new work and of the stop.
        self._meter = LoadMeter(scheduler, self.statistics, self._changed)
        self._closing = False
        self._dead = threading.Event()
        self._isolation = Isolation()
        self._flush = flush
        self._estimate = QueueEstimate(scheduler.max_running)
        self._publisher = Publisher(
            runner=runner,
            scheduler=scheduler,
            guard=self._changed,
            statistics=self.statistics,
            estimate=self._estimate,
            isolation=self._isolation,
            vocabulary=limits.vocabulary_size,
        )
        self._progress = ProgressWatch(step_timeout_s)
        self._step_timeout_s = step_timeout_s
        self._grammars = grammars
        self._lookup = lookup
        self._chooser = chooser
        self._passes = count()
        self._step_under_way: int | None = None  # The number of the current pass.
        self._steps = StepRunner(runner, self.statistics, self._make_room, self._begin_pass)
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._watchdog = Watchdog(f"watchdog-{name}", step_timeout_s, lambda: self._step_under_way, self._hang)
        self._thread.start()
        self._watchdog.start()

    @property
    def load(self) -> EngineLoad:
        return self._meter.read()

    def generate(self, submission: Submission, output: SequenceOutput) -> None:
        """Queues a complete and valid submission, whose tokens go to `output`; one that needs none ends at once.

        Raises OverloadedError if the queue is full or longer than the request can wait, NotReadyError also while
        another request runs isolated, and InvalidRequestError for a request that can never fit.
        """
        adapter = self._adapter(submission.adapter) if submission.adapter else None
        end_ids = self._end_ids if adapter is None else self._end_ids | adapter.end_ids
        sequence = Sequence(submission, output, end_ids, self._runner.start_ids)
        sampling, sequence.adapter = sequence.sampling, adapter
        if (rules := self.rules if adapter is None else adapter.rules) is not None:
            if sampling.structured_outputs:  # The form alone says how an answer begins and ends.
                rules = rules.model_copy(update={"forced_bos_token_id": None, "forced_eos_token_id": ()})
            sequence.row = sequence.row._replace(rules=rules, takes_likeliest=False)
        if (restrictions := sequence.row.restrictions) is not None:
            masked = sampling.end_ids(end_ids) if sampling.min_tokens else frozenset()
            restrictions.check(masked, self.limits.vocabulary_size)
        if not sampling.structured_outputs or sequence.complete == "stop":
            self._begin(sequence)
        elif self._grammars is not None:
            self._grammars.begin(sequence, self._begin, self._flush)
        else:
            raise InvalidRequestError(f"this engine supports no {PARAMETER}", param=PARAMETER)

    def _begin(self, sequence: Sequence) -> None:
        if (reason := sequence.complete) is not None:
            sequence.slot.finish(reason, sequence.usage)
            return
        with self._changed:
            if self._closing or self._dead.is_set():
                raise NotReadyError("the engine is stopping")
            self._queue(sequence)
            self._changed.notify()

    def _adapter(self, number: int) -> Adapter:
        adapter = None if self.adapters is None else self.adapters.get(number)
        if adapter is None:
            raise NotReadyError("the adapter was unloaded")
        return adapter

    def wait_for_death(self, timeout_s: float) -> bool:
        """Waits until the engine cannot continue, or for the timeout; returns whether it has died."""
        return self._dead.wait(timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self._dead.is_set():
            self._thread.join(_STOP_TIMEOUT_S)
        # The thread has ended all requests, unless its step hangs.
        self._end_all()
        self._watchdog.join()
        if self._grammars is not None:
            self._grammars.close()

    def _queue(self, sequence: Sequence) -> None:
        """Queues a sequence, unless it would miss a deadline in the queue or while it runs."""
        if self._estimate.is_late(sequence, self._scheduler.queue_before(sequence), time.monotonic()):
            raise self._estimate.too_late()
        if sequence.alone:
            self._isolation.acquire(sequence)
        try:
            self._scheduler.add(sequence, retry_after_ms=self._estimate.retry_after_ms)
        except HeadraceError:
            self._isolation.release(sequence)
            raise

    def _run(self) -> None:
        try:
            # Inference mode is a property of a thread.
            with torch.inference_mode():
                while self._wait_for_work():
                    self._begin_pass()
                    self._step()
                    self._step_under_way = None
                    self._flush()
        except BaseException:
            logger.critical("the engine died; in flight: %s", self._ids_in_flight(), exc_info=True)
        finally:
            self._end_all()

    def _begin_pass(self) -> None:
        self._step_under_way = next(self._passes)

    def _hang(self) -> None:
        """Declares the engine dead; a step that hangs cannot be stopped."""
        logger.critical("a step takes longer than %g s; in flight: %s", self._step_timeout_s, self._ids_in_flight())
        dump_tracebacks()
        self._end_all()

    def _end_all(self) -> None:
        self._dead.set()
        self._watchdog.end()
        for sequence in self._sequences():
            # Any request of the step may have caused the death: callers that resume elsewhere must count it.
            took_part = sequence.timeline.started is not None and not self._closing
            error = HopBrokenError("the engine died") if took_part else NotReadyError("the engine stopped")
            self._isolation.release(sequence)
            sequence.slot.fail(error)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._scheduler.sequences or self._closing or self._dead.is_set()):
                self._scheduler.restore()
                self._estimate.idle()
                self._meter.idle()
                self._changed.wait()
            return not (self._closing or self._dead.is_set())

    def _step(self) -> None:
        rows = self._schedule()
        self._step_under_way = None
        self._flush()  # Before the rows are computed: if that ends the process, the sequences that started are known.
        self._begin_pass()
        if not rows:
            self._look_for_stuck(set())
        elif self._chooser is None or not all(map(is_plain, rows)) or not self._decode(rows, self._chooser):
            started = time.perf_counter()
            self._end_step(rows, self._steps.run(rows), started)

    def _decode(self, rows: list[Row], runner: PagedRunner) -> bool:
        """Steps in which the same rows decode, until one has to be planned; whether there was any."""
        started = first = time.perf_counter()
        for computed, outcome in overlapped(runner, rows, self._follow):
            if started != first:
                self._scheduler.charge(computed)
                self._meter.begin(computed, started)
            self.statistics.forward_ns += int((time.perf_counter() - started) * 1e9)
            self._end_step(computed, self._steps.judge(outcome), started)
            self._step_under_way = None
            self._flush()  # Before the wait for the step under way.
            self._begin_pass()
            started = time.perf_counter()
        return started != first

    def _follow(self, rows: list[Row]) -> list[Row]:
        with self._changed:
            if self._closing or self._dead.is_set():
                return []
            return self._scheduler.follow(rows, time.monotonic())

    def _end_step(self, rows: list[Row], outcome: Outcome, started: float) -> None:
        """Publishes what a step that began at `started` has computed, and measures it."""
        chunks = [(row.start, row.count) for row in rows if row.count > 1 and not row.sequence.decodes]
        results, failed = outcome
        seconds = time.perf_counter() - started
        self._meter.end(rows, seconds)
        self._publisher.publish(results)
        for sequence, error in failed:
            self._publisher.end(sequence, "failed", error, forget=True)
        self._scheduler.regain()
        elapsed = time.perf_counter() - started
        if self._lookup is not None and not chunks:
            self._lookup.observe(rows, seconds)
        if not any(row.proposed for row in rows):
            self._pace.observe(len(rows) - len(chunks), chunks, elapsed)
            if not chunks:
                self._estimate.stepped(elapsed)
        self.statistics.steps += 1
        self.statistics.step_ns += int(elapsed * 1e9)
        self._look_for_stuck({result.row.sequence for result in results})

    def _schedule(self) -> list[Row]:
        """The rows of this step; sequences that are cancelled, late or crowded out of the queue end first."""
        now = time.monotonic()
        with self._changed:
            sequences, crowded_out = self._scheduler.sequences, set(self._scheduler.crowded_out)
            contended = self._scheduler.contended
        for sequence in sequences:
            if sequence.slot.cancelled:
                self._publisher.cancel(sequence)
            elif (error := sequence.overdue(now)) is not None:
                self._publisher.end(sequence, "failed", error)
            elif sequence in crowded_out:
                self._publisher.end(sequence, "failed", self._scheduler.queue_full(self._estimate.retry_after_ms))
            elif contended and sequence.timeline.started is None and self._estimate.is_hopeless(sequence, now):
                self._publisher.end(sequence, "failed", self._estimate.too_late())
        with self._changed:
            prompts = self._scheduler.prompts
            prefill = self._pace.limit(self._scheduler.streams, prompts) if prompts else 0
            rows = self._scheduler.schedule(prefill, now)
            if self._lookup is not None and not prompts:
                rows = self._lookup.extend(rows)
            self.statistics.preempted = self._scheduler.preempted
            if not rows:
                self._changed.wait(self._scheduler.pause_s)
        self._meter.begin(rows, time.monotonic())
        if rows and rows[0].sequence.alone and not self._announce_isolation(rows[0].sequence):
            return []
        return rows

    def _announce_isolation(self, sequence: Sequence) -> bool:
        """Notifies the caller, once, that a sequence runs isolated; returns whether it should still run."""
        if sequence.alone_is_announced:
            return True
        sequence.alone_is_announced = True
        if sequence.slot.run_alone(_NOTIFY_S):
            return True
        self._publisher.cancel(sequence)
        return False

    def _make_room(self, rows: list[Row]) -> Sequence | None:
        with self._changed:
            hopeless = self._scheduler.make_room(rows)
        if hopeless is None:
            steps, running = self._scheduler.step_tokens, self._scheduler.max_running
            logger.warning("out of memory: steps of %d tokens and %d sequences from now on", steps, running)
        return hopeless

    def _look_for_stuck(self, served: set[Sequence]) -> None:
        with self._changed:
            # A step that served every running sequence leaves none due; `due` costs more than this look.
            due = [] if served.issuperset(self._scheduler.running) else self._scheduler.due
        stuck = self._progress.observe(due, served, time.monotonic())
        if stuck is not None:
            raise EngineDeadError(f"request {stuck.id} gets no token, although steps continue")

    def _sequences(self) -> list[Sequence]:
        with self._changed:
            return self._scheduler.sequences

    def _ids_in_flight(self) -> list[str]:
        return [sequence.id for sequence in self._sequences()]
