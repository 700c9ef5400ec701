"""The plan of a step: attention finds each sequence in the blocks that it has now."""

import torch

from headrace_predictor.engine.runners.attention import StepPlanner
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache
from headrace_predictor.engine.state.sequence import Row, detached_sequence


def planner(blocks=20):
    return StepPlanner(KeyValueCache(CacheShape(1, 1, 1, torch.float32), blocks, torch.device("cpu")))


def held(number, tokens, blocks):
    sequence = detached_sequence([1] * tokens)
    sequence.number, sequence.blocks = number, blocks
    return sequence


def table(plans, *sequences):
    return plans.plan([Row(one, len(one.ids) - 1, 1) for one in sequences]).table.tolist()


def test_a_sequence_that_was_computed_again_is_found_in_its_new_blocks():
    plans, sequence = planner(), held(1, 2 * BLOCK_TOKENS + 1, [3, 4, 5])
    assert table(plans, sequence) == [[3, 4, 5]]
    # It was preempted, others took some of its blocks, and by chance it has the rest again.
    for blocks in ([6, 7, 5], [6, 4, 5], [6, 9, 5]):
        sequence.blocks = blocks
        assert table(plans, sequence) == [blocks]


def test_sequences_that_have_ended_leave_nothing_in_the_table():
    plans = planner()
    long, short = held(1, 3 * BLOCK_TOKENS, [1, 2, 3]), held(2, BLOCK_TOKENS, [4])
    assert table(plans, long, short) == [[1, 2, 3], [4, 0, 0]]
    short.ids.append(1)
    short.blocks.append(9)
    assert table(plans, short) == [[4, 9]]
    assert table(plans, short, long) == [[4, 9, 0], [1, 2, 3]]
