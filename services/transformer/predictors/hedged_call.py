"""One generation at two predictors at once: the first to deliver a position wins, so the crash of one causes no pause.

Possible because the sampler is exact: predictors with the same weights compute the same tokens from the same seed. A
call that ends early is replaced, while another predictor has the same weights; the generation ends with an error only
when no call is left. Owned by one task, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.errors import HopBrokenError, MillraceError, NotFoundError, NotReadyError, OverloadedError
from services.transformer.predictors.link_call import LinkCall
from services.transformer.predictors.tokens import TokenChunk

_CALLS = 2


@dataclass(eq=False)
class _Runner:
    call: LinkCall
    position: int  # Of its next token in the answer.


class HedgedCall:
    """As a LinkCall to its reader.

    `add(calls)` makes a further call, at a predictor that has none of these calls, or returns None; it continues after
    the answer's first `position()` tokens.
    """

    runs_alone = False

    def __init__(
        self, first: LinkCall, add: Callable[[Sequence[LinkCall]], LinkCall | None], position: Callable[[], int]
    ) -> None:
        self._add = add
        self._position = position
        self._runners = [_Runner(first, position())]
        self._earlier_engine_s = 0.0  # Of calls that have ended.

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

    @property
    def is_leaving(self) -> bool:
        """Every predictor that computes it is about to stop."""
        return all(runner.call.is_leaving for runner in self._runners)

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

    def fail(self, error: MillraceError) -> None:
        for runner in self._runners:
            runner.call.fail(error)

    def _complete(self) -> None:
        """Adds calls up to the number that is wanted, as far as there are predictors."""
        while len(self._runners) < _CALLS:
            call = self._add([runner.call for runner in self._runners])
            if call is None:
                return
            self._runners.append(_Runner(call, self._position()))

    def _poll(self) -> TokenChunk | None:
        for runner in tuple(self._runners):
            try:
                chunk = runner.call.poll()
            except (HopBrokenError, NotReadyError, OverloadedError, NotFoundError):
                runner.call.close()
                if len(self._runners) == 1:
                    raise
                self._runners.remove(runner)
                self._earlier_engine_s += runner.call.engine_s
                continue
            if chunk is not None and (new := self._new(runner, chunk)) is not None:
                return new
        return None

    def _new(self, runner: _Runner, chunk: TokenChunk) -> TokenChunk | None:
        """What a chunk adds to the answer."""
        known = self._position() - runner.position
        runner.position += len(chunk.token_ids)
        if known > 0:
            chunk.token_ids = chunk.token_ids[known:]
            chunk.logprobs, chunk.top_logprobs = chunk.logprobs[known:], chunk.top_logprobs[known:]
        if not chunk.token_ids and (chunk.finish_reason is None or runner.position != self._position()):
            return None
        # Both predictors work for it.
        chunk.engine_s = self._earlier_engine_s + sum(runner.call.engine_s for runner in self._runners)
        return chunk
