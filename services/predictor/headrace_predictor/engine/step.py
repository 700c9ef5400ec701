"""Runs the rows of a step so that a failure affects only the row that caused it.

A step that raises is repeated row by row, which is safe because it writes at places given by positions. A step that
runs out of memory makes the next steps smaller, and fails a request only if that is not possible. If every row failed,
with errors or with logits that are not numbers, the model is probed before any failure is reported: a model that cannot
run the simplest input is broken, and no request is to blame. Used only by the engine's thread.

The host handles the results of steps that are `overlapped` while the device computes the next one. A row's next id is
then known on the device alone. The end of a sequence is noticed one step late: what that step computed of it is
dropped; it wrote only to a place of that sequence's own blocks, before any step that may use them. Each token is that
of the engine's plain steps.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.errors import HeadraceError, RequestFailedError
from headrace.grammars import no_token_error
from headrace.oip.prompt_scores import PromptLogprobs
from headrace_predictor.engine.cpu.threads import torch_alone
from headrace_predictor.engine.faults import is_device_error, is_out_of_memory
from headrace_predictor.engine.grammar import forbidden_tokens
from headrace_predictor.engine.interface import EngineDeadError, EngineStatistics, Logprobs
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.sampling.sampler import NO_TOKEN, sample
from headrace_predictor.engine.sampling.vocabulary import score
from headrace_predictor.engine.state.cache import on_device
from headrace_predictor.engine.state.sequence import Row, Sequence

logger = logging.getLogger(__name__)

_FEW_TOKENS = 64  # A second thread gains nothing in torch's own operations.


class Result(NamedTuple):
    """A computed row; its token, if it samples; its scores of the prompt."""

    row: Row
    token_id: int
    logprobs: Logprobs | None
    scores: PromptLogprobs | None = None


class Outcome(NamedTuple):
    """The outcome of a step: computed rows, and sequences that must end; some rows may be in neither."""

    results: list[Result]
    failed: list[tuple[Sequence, HeadraceError]]


class StepRunner:
    """See the module.

    `make_room` is the scheduler's. `begin` is called before each pass except the first, because each has the timeout of
    a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        statistics: EngineStatistics,
        make_room: Callable[[list[Row]], Sequence | None],
        begin: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._statistics = statistics
        self._make_room = make_room
        self._begin = begin

    def run(self, rows: list[Row]) -> Outcome:
        """Computes the rows; raises errors for which no request is to blame."""
        return self.judge(self._run(rows))

    def judge(self, outcome: Outcome) -> Outcome:
        """The outcome in which rows without numbers fail; raises errors for which no request is to blame."""
        broken = [row for row, token_id, _, scores in outcome.results if _is_broken(row, token_id, scores)]
        if not (outcome.failed or broken):
            return outcome
        sampled = [result for result in outcome.results if result.row.samples]
        numbers = not sampled or any(result.token_id != NO_TOKEN for result in sampled)
        if (outcome.failed and not outcome.results) or not numbers:
            self._runner.probe()
        failed = list(outcome.failed)
        failed += [(row.sequence, _failure_of(row)) for row in broken]
        ended = {sequence for sequence, _ in failed}
        return Outcome([result for result in outcome.results if result.row.sequence not in ended], failed)

    def _run(self, rows: list[Row]) -> Outcome:
        try:
            return Outcome(self._try(rows), [])
        except Exception as error:
            if is_device_error(error):
                raise EngineDeadError("the device failed") from error
            if is_out_of_memory(error):
                return Outcome([], self._shrink(rows, error))
            return self._replay(rows, error)

    def _try(self, rows: list[Row]) -> list[Result]:
        started = time.perf_counter_ns()
        with torch_alone() if sum(row.count for row in rows) <= _FEW_TOKENS else nullcontext():
            logits = self._runner.run(rows)
        self._statistics.forward_ns += time.perf_counter_ns() - started
        sampling = [row for row in rows if row.samples]
        scoring = [row for row in rows if row.scores]
        results = [Result(row, NO_TOKEN, None) for row in rows if not row.samples] if len(sampling) < len(rows) else []
        if sampling:
            parts, inputs = sampling, [row.sequence.row for row in sampling]
            if any(row.proposed for row in sampling):
                both = [part for row in sampling for part in row.parts()]
                parts, inputs = [part for part, _ in both], [row for _, row in both]
            last = logits[: len(parts)] if scoring else logits
            sampled = sample(last, inputs, forbidden_tokens(parts, last.shape[1]))
            found = map(Result, parts, sampled.token_ids, sampled.logprobs)
            results += found if parts is sampling else self._verified(sampling, found)
        if scoring:
            first = len(logits) - sum(len(row.scores) for row in scoring)
            scores = dict(zip(scoring, score(logits[first:], scoring), strict=True))
            results = [result._replace(scores=scores.get(result.row)) for result in results]
        return results

    def _verified(self, rows: list[Row], results: Iterator[Result]) -> Iterator[Result]:
        """The results of rows whose ids are the sequence's: up to the first token that is not the proposed one."""
        for row in rows:
            first = next(results)
            yield first
            token_id, stands = first.token_id, True
            for proposed in row.proposed:
                result = next(results)
                # Without numbers the sequence fails in the next step, after the tokens that it has.
                stands = stands and token_id == proposed and result.token_id != NO_TOKEN
                if stands:
                    yield result
                    token_id = result.token_id
                    self._statistics.accepted_tokens += 1
            self._statistics.proposed_tokens += len(row.proposed)

    def _replay(self, rows: list[Row], error: Exception) -> Outcome:
        """Runs each row alone, so that only the culprit fails."""
        results: list[Result] = []
        failed: list[tuple[Sequence, HeadraceError]] = []
        for row in rows:
            if not row.sequence.blocks:
                continue  # It was preempted for another row.
            self._begin()
            try:
                if len(rows) == 1:
                    raise error
                results += self._try([row])
            except Exception as own:
                if is_device_error(own):
                    raise EngineDeadError("the device failed") from own
                if is_out_of_memory(own):
                    failed += self._shrink([row], own)
                    continue
                logger.exception("request %s failed in the model", row.sequence.id)
                failed.append((row.sequence, RequestFailedError("the model failed on this request")))
        return Outcome([result for result in results if result.row.sequence.blocks], failed)

    def _shrink(self, rows: list[Row], error: Exception) -> list[tuple[Sequence, HeadraceError]]:
        """Reacts to a failed allocation: smaller steps, then fewer sequences, then the failure of one request."""
        hopeless = self._make_room(rows)
        if hopeless is None:
            return []
        logger.error("out of memory on request %s alone", hopeless.id, exc_info=error)
        return [(hopeless, RequestFailedError("there is not enough memory for this request"))]


def _failure_of(row: Row) -> HeadraceError:
    """The error of a row that has no token: the model failed, or the request allows none."""
    sampling, rules = row.sequence.sampling, row.sequence.row.rules
    lasts = not sampling.may_end(len(row.sequence.output_ids))
    if bool(sampling.structured_outputs) + sampling.has_restrictions + (rules is not None) + lasts > 1:
        return no_token_error()
    logger.error("request %s: the model's logits are not numbers", row.sequence.id)
    return RequestFailedError("the model failed on this request")


def _is_broken(row: Row, token_id: int, scores: PromptLogprobs | None) -> bool:
    """Whether the model's logits are not numbers."""
    return (token_id == NO_TOKEN and row.samples) or (scores is not None and bool(np.isnan(scores.chosen).any()))


class _Pending(NamedTuple):
    """A step that has begun; `read` waits for the device and returns its tokens."""

    rows: list[Row]
    tokens: Tensor
    read: Callable[[], list[int]]


def is_plain(row: Row) -> bool:
    """Whether a row's next token depends on nothing that the host derives from its earlier ones."""
    sequence = row.sequence
    return (
        row.count == 1
        and row.samples
        and not row.scores
        and sequence.sampling.is_plain
        and not sequence.sampling.pace
        and sequence.row.rules is None
        and sequence.constraint is None
        and sequence.adapter is None
        and not sequence.alone
    )


def overlapped(
    runner: PagedRunner, rows: list[Row], follow: Callable[[list[Row]], list[Row]]
) -> Iterator[tuple[list[Row], Outcome]]:
    """Rows and outcome of each step; each begins before the outcome of the one before is read.

    `follow` has the rows of the next step, none where it has to be planned. A step that cannot begin ends them: the
    plain step has the same error, and finds its cause.
    """
    pending = _begin(runner, rows)
    while pending is not None:
        next_rows = follow(pending.rows)
        following = _begin(runner, next_rows, pending) if next_rows else None
        tokens = zip(pending.rows, pending.read(), strict=True)
        yield pending.rows, Outcome([Result(row, token, None) for row, token in tokens if row.sequence.blocks], [])
        pending = following


def _begin(runner: PagedRunner, rows: list[Row], before: _Pending | None = None) -> _Pending | None:
    try:
        tokens = None if before is None else before.tokens
        if before is not None and len(rows) < len(before.rows):
            places = {row.sequence: i for i, row in enumerate(before.rows)}
            kept = on_device([places[row.sequence] for row in rows], np.int64, before.tokens.device)
            tokens = before.tokens.index_select(0, kept)
        chosen = runner.choose(rows, tokens)
        return _Pending(rows, chosen, _reading(chosen))
    except Exception:
        logger.warning("a step did not begin before the last one's end", exc_info=True)
        return None


def _reading(tokens: Tensor) -> Callable[[], list[int]]:
    host = tokens.to("cpu", non_blocking=True, copy=True)  # To pinned memory: nothing waits.
    copied = torch.get_device_module(tokens.device).Event()
    copied.record()
    return lambda: copied.synchronize() or host.tolist()
