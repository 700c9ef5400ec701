"""Checks the grammars of `structured_outputs` before a request goes to a predictor, on threads; keeps the results."""

from __future__ import annotations

from collections import OrderedDict

from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace.grammars import check_grammar
from headrace_transformer.models.work_pool import WorkPool

_THREADS, _MAX_WAITING = 2, 256
_KEPT = 256
_PASSED = "the deadline passed while the grammar of structured_outputs was checked"


class GrammarChecks:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._threads = WorkPool(_THREADS, _MAX_WAITING, "grammars")
        self._results: OrderedDict[str, InvalidRequestError | None] = OrderedDict()

    async def check(self, text: str, deadline: Deadline) -> None:
        """Raises InvalidRequestError for a grammar that cannot be compiled or met."""
        if text in self._results:
            self._results.move_to_end(text)
            refusal = self._results[text]
        else:
            async with deadline.scope(_PASSED):
                refusal = await self._threads.run(_refusal, text)
            self._results[text] = refusal
            if len(self._results) > _KEPT:
                self._results.popitem(last=False)
        if refusal is not None:
            raise InvalidRequestError(refusal.message, param=refusal.param)


def _refusal(text: str) -> InvalidRequestError | None:
    try:
        check_grammar(text)
    except InvalidRequestError as refusal:
        return refusal
    return None
