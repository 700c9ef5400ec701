"""Computes steps with vLLM's LLMEngine.

The scheduler of the predictor's engine decides which sequences run; those are in vLLM, which batches them as it likes,
divides their prompts, and may be ahead of a sequence: the tokens for which a step has no row, because the sequence's
pace holds them, are kept until a step has one. A sequence that leaves the scheduler's rows for good, or is preempted,
loses its `state` and is aborted before the next step.

While a sequence runs isolated, vLLM has no other; the others return afterwards.

An error of a step is the engine's death: vLLM cannot name the request that caused it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import HeadraceError, InvalidRequestError, RequestFailedError
from headrace.oip.prompt_scores import PromptLogprobs
from headrace_predictor.engine.interface import EngineStatistics, Logprobs
from headrace_predictor.engine.sampling.sampler import NO_TOKEN
from headrace_predictor.engine.state.sequence import Row, Sequence
from headrace_predictor.engine.step import Outcome, Result
from headrace_predictor.vllm_engine.constrained import checked
from headrace_predictor.vllm_engine.parameters import VllmRequest, vllm_request

_LOWEST = -9999.0  # Log probabilities that are minus infinity, as vLLM's own server has them.

# vLLM's log probabilities of one position: token id → an object with `logprob` and `rank`; the likeliest has rank 1.
Position = Mapping[int, Any]


class _Token(NamedTuple):
    id: int
    logprobs: Logprobs | None


class _InVllm:
    """A sequence in vLLM: the tokens that no step has taken yet, and why there will be no more."""

    def __init__(self, number: str, sequence: Sequence, repeated: tuple[int, ...]) -> None:
        self.number = number
        self.sequence = sequence
        self.repeated = deque(repeated)
        self.tokens: deque[_Token] = deque()
        self.prompt: list[Position | None] = []
        self.cached_tokens = 0
        self.ended = ""  # vLLM's finish reason.
        self.error: HeadraceError | None = None

    def take(self, output: Any) -> None:
        """Takes a RequestOutput."""
        if self.error is not None:
            return
        self.prompt += output.prompt_logprobs or ()
        self.cached_tokens = output.num_cached_tokens or 0
        (completion,) = output.outputs
        positions = completion.logprobs or [None] * len(completion.token_ids)
        top = self.sequence.sampling.top_logprobs
        for token_id, position in zip(completion.token_ids, positions, strict=True):
            if self.repeated:
                if token_id != self.repeated.popleft():
                    self.error = RequestFailedError("vLLM does not repeat the tokens of the answer's beginning")
                    return
                continue
            logprobs = None if position is None else _logprobs(position, token_id, top)
            self.tokens.append(_Token(token_id, logprobs))
        if output.finished:
            self.ended = completion.finish_reason or "nothing"

    @property
    def failure(self) -> HeadraceError | None:
        """Why the sequence cannot get another token."""
        if self.error is None and self.ended and not self.tokens:
            return RequestFailedError(f"vLLM ended the request early: {self.ended}")
        return self.error


class VllmComputer:
    """A StepComputer. `llm` is vLLM's LLMEngine; `parameters` makes its SamplingParams, `inputs` its prompt.

    `end_id` is the end token of vLLM's grammars, None if it has none.
    """

    start_ids: tuple[int, ...] = ()

    def __init__(
        self,
        llm: Any,
        parameters: Callable[..., Any],
        inputs: Callable[..., Any],
        eos_ids: frozenset[int],
        description: str,
        end_id: int | None = None,
    ) -> None:
        self.description = description
        self._llm = llm
        self._parameters = parameters
        self._inputs = inputs
        self._eos_ids = eos_ids
        self._end_id = end_id
        self._in_vllm: dict[str, _InVllm] = {}
        self._numbers = count()

    def clear(self, blocks: list[int]) -> None:
        """Nothing: the scheduler's blocks are an account, and vLLM's own are not shared with what failed."""

    def compute(self, rows: list[Row], statistics: EngineStatistics) -> Outcome:
        """See StepComputer. vLLM takes a step unless it is ahead of all rows."""
        self._abort_absent(rows)
        failed = self._add_new(rows)
        if any(_lacks_token(row) for row in rows):
            started = time.perf_counter_ns()
            for output in self._llm.step():
                if (request := self._in_vllm.get(output.request_id)) is not None:
                    request.take(output)
            statistics.forward_ns += time.perf_counter_ns() - started
        results: list[Result] = []
        for row in rows:
            request = row.sequence.state
            if not isinstance(request, _InVllm):
                if not row.samples:  # The beginning of a prompt that is scored: vLLM gets it with its end.
                    results.append(Result(row, NO_TOKEN, None))
            elif (constraint := row.sequence.constraint) is not None and constraint.has_ended:
                results.append(Result(row, NO_TOKEN, None))
            elif (error := self._check(request)) is not None:
                failed.append((row.sequence, error))
            elif request.tokens:
                results += self._results(row, request, statistics)
            elif not row.sequence.proven:
                # vLLM still computes its prompt.
                results.append(Result(Row(row.sequence, 0, row.sequence.computed), NO_TOKEN, None))
        return Outcome(results, failed)

    def _check(self, request: _InVllm) -> HeadraceError | None:
        """Why a sequence cannot get another token; without a reason, its next one is a token that its form allows."""
        if request.sequence.constraint is not None and request.tokens and request.error is None:
            token = request.tokens[0]
            token_id = checked(request.sequence, token.id, self._end_id, self._eos_ids)
            if isinstance(token_id, HeadraceError):
                return token_id
            request.tokens[0] = token._replace(id=token_id)
        return request.failure

    def _abort_absent(self, rows: list[Row]) -> None:
        """Takes sequences out of vLLM that have ended, are preempted, or wait for an isolated one."""
        alone = rows[0].sequence if rows[0].sequence.alone else None
        for request in list(self._in_vllm.values()):
            sequence = request.sequence
            if sequence.state is request and alone in (None, sequence):
                continue
            if sequence.state is request:
                sequence.state = None
            del self._in_vllm[request.number]
            if not request.ended:
                self._llm.abort_request([request.number])

    def _add_new(self, rows: list[Row]) -> list[tuple[Sequence, HeadraceError]]:
        """Gives vLLM the sequences that it does not have; returns those that it refuses."""
        failed: list[tuple[Sequence, HeadraceError]] = []
        for row in rows:
            sequence = row.sequence
            if sequence.state is not None or not row.samples:
                continue
            number = str(next(self._numbers))
            try:
                request = vllm_request(sequence, self._eos_ids, self._end_id)
                self._add(number, request, sequence)
            except InvalidRequestError as refusal:
                failed.append((sequence, refusal))
                continue
            except Exception as error:  # vLLM's errors of a request are of many types.
                failed.append((sequence, InvalidRequestError(f"vLLM refuses the request: {error}")))
                continue
            sequence.state = self._in_vllm[number] = _InVllm(number, sequence, request.repeated)
            # From now on it lacks its next token only, as the scheduler sees it.
            sequence.computed = len(sequence.ids) - 1
        return failed

    def _add(self, number: str, request: VllmRequest, sequence: Sequence) -> None:
        prompt = self._inputs(request.prompt_ids, cache_salt=request.cache_salt)
        sampling = dict(request.sampling)
        if sequence.proven:
            sampling["prompt_logprobs"] = None  # Its first token had them.
        self._llm.add_request(number, prompt, self._parameters(**sampling))

    def _results(self, row: Row, request: _InVllm, statistics: EngineStatistics) -> Iterator[Result]:
        """The tokens of a sequence: all that vLLM has, or one if they are paced or any may be the last."""
        sequence = row.sequence
        scores = None
        if not sequence.proven:
            if not sequence.cached_tokens:
                sequence.cached_tokens = min(request.cached_tokens, len(sequence.input_ids))
                statistics.cached_tokens += sequence.cached_tokens
            scores = _prompt_logprobs(sequence, request.prompt)
            request.prompt = []
        tokens = 1 if sequence.sampling.pace or sequence.constraint is not None else len(request.tokens)
        for number in range(tokens):
            token = request.tokens.popleft()
            if number:
                row = Row(sequence, row.start + row.count, 1)
                row.samples = True
            yield Result(row, token.id, token.logprobs, scores if not number else None)


def _lacks_token(row: Row) -> bool:
    request = row.sequence.state
    return isinstance(request, _InVllm) and not request.tokens and request.failure is None


def _logprobs(position: Position, token_id: int, top: int) -> Logprobs:
    return Logprobs(max(position[token_id].logprob, _LOWEST), _likeliest(position, top))


def _likeliest(position: Position, top: int) -> list[tuple[int, float]]:
    ranked = sorted((each.rank, token_id, each.logprob) for token_id, each in position.items() if each.rank <= top)
    return [(token_id, max(logprob, _LOWEST)) for _, token_id, logprob in ranked]


def _prompt_logprobs(sequence: Sequence, positions: list[Position | None]) -> PromptLogprobs | None:
    """Those of the prompt's ids from the second on; `positions` has also what followed the prompt."""
    top = sequence.prompt_logprobs
    if top is None or sequence.scored == sequence.to_score:
        return None
    ids = sequence.input_ids
    scored = [(token_id, position) for token_id, position in zip(ids, positions, strict=False) if position is not None]
    likeliest = [_likeliest(position, top) for _, position in scored]
    return PromptLogprobs(
        np.array([position[token_id].logprob for token_id, position in scored], np.float32),
        np.array([[token_id for token_id, _ in each] for each in likeliest], np.int32).reshape(len(scored), top),
        np.array([[logprob for _, logprob in each] for each in likeliest], np.float32).reshape(len(scored), top),
    )
