"""Prompt lookup proposes what followed the latest tokens before, where that pays."""

import random

import pytest

from headrace_predictor.engine.lookup import PromptLookup, Proposals
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Row, detached_sequence

PLAIN_S = 0.01


@pytest.mark.parametrize(
    ("ids", "proposed"),
    [
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 9, 9, 9, 8, 1, 2, 3], [5, 9, 9, 9, 8, 1, 2]),  # The latest place.
        ([7, 1, 2, 7, 1, 2, 7, 1], [2, 7, 1, 2, 7, 1, 2]),  # It repeats itself.
        ([4, 4, 4, 4], [4] * 7),
    ],
)
def test_the_tokens_that_followed_are_proposed(ids, proposed):
    assert Proposals().propose(ids) == proposed
    grown = Proposals()
    for end in range(1, len(ids)):
        grown.propose(ids[:end])
    assert grown.propose(ids) == proposed


class Stream:
    """Sequences whose next tokens are known; steps take `PLAIN_S`, or `extended_s` with proposals."""

    def __init__(self, texts, extended_s=PLAIN_S, blocks=64, **sampling):
        self.sequences = [detached_sequence(text[:9]) for text in texts]
        manager = BlockManager(blocks, 8)
        for sequence in self.sequences:
            sequence.sampling = sequence.sampling.model_copy(update={"max_tokens": len(texts[0]) - 9, **sampling})
            sequence.blocks = [manager.take(), manager.take()]
        self._texts, self._extended_s, self._lookup = texts, extended_s, PromptLookup(manager)

    def step(self):
        """The number of rows of a step."""
        rows = []
        for sequence in self.sequences:
            while len(sequence.blocks) * 8 <= len(sequence.ids):
                sequence.blocks.append(0)
            rows.append(Row(sequence, len(sequence.ids) - 1, 1))
        rows = self._lookup.extend(rows)
        self._lookup.observe(rows, self._extended_s if any(row.proposed for row in rows) else PLAIN_S)
        for row, text in zip(rows, self._texts, strict=True):
            sequence = row.sequence
            assert len(sequence.blocks) * 8 >= row.start + row.count
            for token_id in (*row.proposed, None):
                right = text[len(sequence.ids)]
                sequence.ids.append(right)
                sequence.output_ids.append(right)
                if token_id != right or len(sequence.ids) == len(text) - 1:
                    break
            else:
                raise AssertionError("a proposal beyond the last token")
        return sum(row.count for row in rows)

    def run(self):
        steps = []
        while all(len(s.ids) < len(t) - 1 for s, t in zip(self.sequences, self._texts, strict=True)):
            steps.append(self.step())
        return steps


REPEATING = [*range(50, 80)] * 20
RANDOM = random.Random(1).choices(range(20), k=len(REPEATING))


def test_a_text_that_repeats_takes_fewer_steps_and_a_random_one_none_with_proposals():
    steps = Stream([REPEATING]).run()
    assert len(steps) < 140
    assert set(steps) <= {1, *range(2, 9)}
    assert set(Stream([RANDOM], extended_s=1.5 * PLAIN_S).run()) == {1}


def test_what_does_not_pay_ends_and_is_tried_again_seldom():
    steps = Stream([REPEATING], extended_s=9 * PLAIN_S).run()
    assert 3 <= sum(step > 1 for step in steps) < 10


def test_rows_fill_a_size_of_steps_and_many_streams_propose_nothing():
    assert {step for step in Stream([REPEATING, RANDOM]).run() if step > 2} <= {8}
    assert {step for step in Stream([REPEATING] * 3).run() if step > 3} <= {8, 16, 24}
    assert set(Stream([REPEATING] * 5).run()) == {5}


@pytest.mark.parametrize("case", [{"pace": 5.0}, {"stop_token_ids": [*range(50, 80)]}, {"blocks": 3}])
def test_no_proposals_where_the_next_token_is_due_later_or_may_be_the_last_or_has_no_block(case):
    stream = Stream([REPEATING[:60]], **case)
    for sequence in stream.sequences:
        sequence.end_ids = frozenset(sequence.sampling.stop_token_ids)
    most = 8 if "blocks" in case else 1
    while len(stream.sequences[0].ids) < (16 if "blocks" in case else 58):
        assert stream.step() <= most
