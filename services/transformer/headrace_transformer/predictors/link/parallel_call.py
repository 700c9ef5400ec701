"""One generation at several predictors at once: the first to deliver a position wins, so the end of one is no pause.

Predictors with the same weights compute the same tokens from the same seed, except where their sums are rounded
differently, as in bfloat16. So a call is of use only as long as all tokens that it has delivered are the answer's: one
that differs is ended, and replaced by one that continues after the answer's tokens. The answer is thus at any time the
whole output of each of its calls. A hedged generation has two calls. Any generation has one more while its predictor is
about to stop, until the call that replaces that predictor's has begun. A call that ends early is replaced, while
another predictor has the same weights; the generation ends with an error only when no call is left. Owned by one task,
on the event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import ClassVar

from headrace.errors import DrainingError, HeadraceError, HopBrokenError, NotFoundError, NotReadyError, OverloadedError
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.link.link_call import LinkCall

logger = logging.getLogger(__name__)

_MAX_DIFFERENT = 3  # Calls of an answer that differed: beyond that, none is replaced.


@dataclass(eq=False)
class _Runner:
    call: LinkCall
    position: int  # Of its next token in the answer.


@dataclass(eq=False)
class ParallelCall:
    """As a LinkCall to its reader.

    `calls`: how many are wanted, at predictors that stay. `add(calls)` makes a further one, at a predictor that has
    none of these calls, or returns None; it continues after the answer's tokens so far, `output_ids`, which grow.
    """

    runs_alone: ClassVar = False

    first: InitVar[LinkCall]
    calls: int
    add: Callable[[Sequence[LinkCall]], LinkCall | None]
    output_ids: Sequence[int]
    _different: int = 0
    _earlier_engine_s: float = 0.0  # Of calls that have ended.
    _has_moved: bool = False  # The next tokens are the first of another predictor.

    def __post_init__(self, first: LinkCall) -> None:
        self._runners = [_Runner(first, len(self.output_ids))]

    @property
    def is_accepted(self) -> bool:
        return any(runner.call.is_accepted for runner in self._runners)

    @property
    def fingerprint(self) -> str:
        return next((runner.call.fingerprint for runner in self._runners if runner.call.is_accepted), "")

    @property
    def predictor(self) -> str:
        """The name of the predictor that has computed it for longest."""
        return self._runners[0].call.predictor

    async def read(self) -> TokenChunk | None:
        """The new tokens of whichever call has them first; see LinkCall."""
        self._complete()
        if (chunk := self._poll()) is None:
            waiter = asyncio.get_running_loop().create_future()
            for runner in self._runners:
                runner.call.waiter = waiter
            try:
                await waiter
            finally:
                for runner in self._runners:
                    runner.call.waiter = None
            chunk = self._poll()
        return chunk

    def close(self) -> None:
        for runner in self._runners:
            runner.call.close()

    def fail(self, error: HeadraceError) -> None:
        for runner in self._runners:
            runner.call.fail(error)

    def _complete(self) -> None:
        """Adds calls up to the number that is wanted, as far as there are predictors; ends those at predictors that are
        about to stop, once as many others as wanted have begun."""
        staying = [runner for runner in self._runners if not runner.call.is_leaving]
        while len(staying) < self.calls and self._different <= _MAX_DIFFERENT:
            call = self.add([runner.call for runner in self._runners])
            if call is None:
                break
            staying.append(_Runner(call, len(self.output_ids)))
            self._runners.append(staying[-1])
        if len(staying) < len(self._runners) and sum(runner.call.has_begun for runner in staying) >= self.calls:
            for runner in tuple(self._runners):
                if runner not in staying:
                    self._end(runner)

    def _end(self, runner: _Runner) -> None:
        runner.call.close()
        self._has_moved |= self.calls == 1 and runner is self._runners[0]
        self._runners.remove(runner)
        self._earlier_engine_s += runner.call.engine_s

    def _poll(self) -> TokenChunk | None:
        for runner in tuple(self._runners):
            try:
                chunk = runner.call.poll()
                new = None if chunk is None else self._new(runner, chunk)
            except (HopBrokenError, NotReadyError, OverloadedError, NotFoundError):
                if len(self._runners) == 1:
                    raise
                self._end(runner)
                continue
            if new is not None:
                return new
        return None

    def _new(self, runner: _Runner, chunk: TokenChunk) -> TokenChunk | None:
        """What a chunk adds to the answer; raises DrainingError where its tokens are not the answer's."""
        known = len(self.output_ids) - runner.position
        common = self.output_ids[runner.position : runner.position + len(chunk.token_ids)]
        runner.position += len(chunk.token_ids)
        is_short = chunk.finish_reason is not None and runner.position < len(self.output_ids)
        if is_short or chunk.token_ids[: len(common)] != common:
            self._different += 1
            logger.info("a predictor computes other tokens than the answer's, before token %d", runner.position)
            raise DrainingError("the predictor computes other tokens than the answer's", hop="predictor")
        if known > 0:
            chunk = chunk.part(known)
        if not chunk.token_ids and chunk.finish_reason is None:
            return None
        while self.calls == 1 and runner is not self._runners[0]:
            self._end(self._runners[0])  # It is about to stop, and this one has begun.
        if self._has_moved:
            chunk.resumed, self._has_moved = True, False
        # All of them work for it.
        chunk.engine_s = self._earlier_engine_s + sum(runner.call.engine_s for runner in self._runners)
        return chunk
