"""A hedged answer is the whole output of one predictor: the tokens of two that differ are never mixed."""

import pytest

from headrace.errors import DrainingError, HopBrokenError
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.link.parallel_call import ParallelCall


class ScriptedCall:
    """As a LinkCall: has one chunk, or None, at each poll, at last with `finish_reason` or `error`."""

    engine_s, fingerprint, predictor = 0.0, "f", "p"
    is_accepted = has_begun = True

    def __init__(self, *chunks, error=None, finish_reason=None):
        self.is_leaving, self.is_closed = False, False
        self._chunks, self._error, self._finish_reason = list(chunks), error, finish_reason

    def poll(self):
        if not self._chunks and self._error is not None:
            raise self._error
        chunk = self._chunks.pop(0) if self._chunks else None
        is_last = not self._chunks
        if chunk is None:
            return None
        self.engine_s += 1.0
        logprobs, top = [-float(token) for token in chunk], [{token: -float(token)} for token in chunk]
        reason = self._finish_reason if is_last else None
        return TokenChunk(list(chunk), logprobs=logprobs, top_logprobs=top, finish_reason=reason)

    def close(self):
        self.is_closed = True

    @property
    def waiter(self):
        raise NotImplementedError

    @waiter.setter
    def waiter(self, waiter):
        if waiter is not None and (self._chunks or self._error) and not waiter.done():
            waiter.set_result(None)


async def answered(first, *others):
    """The answer's ids, and at which of them each further call was added."""
    ids, added, others = [], [], list(others)

    def add(calls):
        if not others:
            return None
        added.append(len(ids))
        return others.pop(0)

    call = ParallelCall(first, 2, add, ids)
    while len(ids) < 6:
        chunk = await call.read()
        if chunk is not None:
            ids += chunk.token_ids
    return ids, added


async def test_calls_that_agree_take_turns_by_who_is_first():
    slow, fast = ScriptedCall(None, [1], [2, 3], [4], [5, 6]), ScriptedCall([1, 2], [3, 4, 5], [6])
    assert await answered(slow, fast) == ([1, 2, 3, 4, 5, 6], [0])
    assert [slow.is_closed, fast.is_closed] == [False, False]


async def test_a_call_that_differs_is_ended_and_replaced_after_the_answers_tokens():
    first, other, third = ScriptedCall([1], None, None, [2, 3]), ScriptedCall([1], [9, 8], [7], [6, 5]), ScriptedCall()
    # `other` is the first to have a second token: from there on the answer is its own.
    assert await answered(first, other, third) == ([1, 9, 8, 7, 6, 5], [0, 4])
    assert (first.is_closed, other.is_closed, third.is_closed) == (True, False, False)


async def test_an_early_end_of_one_is_a_difference_too():
    first, other = ScriptedCall([1, 2, 3], None, [4], [5, 6]), ScriptedCall([1, 2], finish_reason="stop")
    assert await answered(first, other) == ([1, 2, 3, 4, 5, 6], [0])
    assert other.is_closed


async def test_the_last_call_that_differs_lets_the_answer_resume():
    ids = []
    first, other = ScriptedCall([1, 2], error=HopBrokenError("lost")), ScriptedCall(None, [1, 3])
    call = ParallelCall(first, 2, lambda calls: other if calls == [first] else None, ids)
    ids += (await call.read()).token_ids
    with pytest.raises(DrainingError, match="other tokens"):
        await call.read()


async def test_tokens_that_the_answer_has_already_are_left_out_with_their_log_probabilities():
    ids = []
    first, other = ScriptedCall([1], None, [2, 3]), ScriptedCall([1, 2])
    call = ParallelCall(first, 2, lambda calls: other if calls == [first] else None, ids)
    ids += (await call.read()).token_ids
    chunk = await call.read()
    assert (chunk.token_ids, chunk.logprobs, chunk.top_logprobs) == ([2], [-2.0], [{2: -2.0}])
    assert chunk.engine_s == 2.0, "both predictors have worked for it"


async def test_a_whole_answer_of_the_replacement_has_moved_and_keeps_the_engine_time_of_both():
    first, other, ids = ScriptedCall([1, 2], None, [3]), ScriptedCall([3, 4], finish_reason="stop"), []
    call = ParallelCall(first, 1, lambda calls: other if calls == [first] else None, ids)
    ids += (await call.read()).token_ids
    first.is_leaving, other.has_begun = True, False
    chunk = await call.read()
    assert (chunk.token_ids, chunk.resumed, chunk.engine_s) == ([3, 4], True, 2.0)
    assert first.is_closed


async def test_calls_that_always_differ_are_not_replaced_for_ever():
    others = [ScriptedCall(*([0] for _ in range(9))) for _ in range(9)]
    first = ScriptedCall(*([number] for number in range(1, 7)))
    ids, added = await answered(first, *others)
    assert len(added) <= 4
    assert ids == [1, 2, 3, 4, 5, 6]
