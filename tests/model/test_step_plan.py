"""What a step runs on: its plan, recorded passes of few sizes, and a cache whose memory grows with its use."""

import sys
from pathlib import Path

import pytest
import torch

from headrace_predictor.engine.runners.attention import StepPlanner
from headrace_predictor.engine.runners.decode_graphs import row_bucket
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, GrowingMemory, KeyValueCache
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from tests.waiting import until

MIB = 1 << 20
READS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


def test_buckets_are_few_and_large_enough():
    for rows in range(1, 257):
        assert rows <= row_bucket(rows) <= max(2 * rows, rows + 15)
    assert [row_bucket(rows) for rows in (1, 2, 3, 5, 9, 16, 17, 25, 33, 64, 65)] == [
        *(1, 2, 4, 8, 16, 16, 24, 32, 48, 64, 80)
    ]
    assert len({row_bucket(rows) for rows in range(1, 65)}) == 9


def resident(memory):
    """Bytes of the mapping at a tensor's address that are in memory."""
    for mapping in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        lines = mapping.strip().splitlines()
        spans = [line for line in lines if "-" in line.split()[0] and ":" not in line.split()[0]]
        if spans and int(spans[-1].split("-")[0], 16) <= memory.data_ptr() < int(
            spans[-1].split()[0].split("-")[1], 16
        ):
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise AssertionError("not mapped")


@READS_PROC
def test_a_block_takes_memory_only_for_itself():
    shape = CacheShape(layers=16, heads=4, head_size=64, dtype=torch.float32)
    cache = KeyValueCache(shape, 1000, torch.device("cpu"))
    tokens = torch.ones(BLOCK_TOKENS, 4, 64)
    places = torch.full((BLOCK_TOKENS,), 1), torch.arange(BLOCK_TOKENS)
    for layer in range(16):
        cache.write(layer, places, tokens, tokens)
    assert resident(cache.keys[0]) <= 4 * MIB


@READS_PROC
async def test_pages_are_allocated_before_they_are_written():
    memory = GrowingMemory(64 * MIB)
    numbers = memory.tensor((64 * MIB,), torch.uint8)
    for _ in range(8):
        memory.expect(MIB)
    await until(lambda: 8 * MIB <= resident(numbers) <= 12 * MIB)
    assert not numbers.any()
