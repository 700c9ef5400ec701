"""The cache's memory grows with its use, and its pages are allocated ahead of the first write."""

import sys
from pathlib import Path

import pytest
import torch

from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, GrowingMemory, KeyValueCache
from tests.waiting import until

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


def test_a_block_takes_memory_only_for_itself():
    shape = CacheShape(layers=16, heads=4, head_size=64, dtype=torch.float32)
    cache = KeyValueCache(shape, 1000, torch.device("cpu"))
    tokens = torch.ones(BLOCK_TOKENS, 4, 64)
    places = torch.full((BLOCK_TOKENS,), 1), torch.arange(BLOCK_TOKENS)
    for layer in range(16):
        cache.write(layer, places, tokens, tokens)
    assert resident(cache.keys[0]) <= 4 * MIB


async def test_pages_are_allocated_before_they_are_written():
    memory = GrowingMemory(64 * MIB)
    numbers = memory.tensor((64 * MIB,), torch.uint8)
    for _ in range(8):
        memory.expect(MIB)
    await until(lambda: 8 * MIB <= resident(numbers) <= 12 * MIB)
    assert not numbers.any()
