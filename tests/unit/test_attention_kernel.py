"""The compiled attention: right, and the same to the last bit whatever stands beside a token."""

import pytest
import torch

from services.predictor.engine import kernel
from services.predictor.engine.cache import BLOCK_TOKENS, CacheShape, KeyValueCache

SIZE = 16
BLOCKS = 12


def filled_cache(heads, dtype):
    cache = KeyValueCache(CacheShape(1, heads, SIZE, dtype), BLOCKS + 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


def reference(cache, table, owner, first, end, query, scale):
    keys, values = cache.read(0, table[owner : owner + 1])
    keys, values = keys[0].float(), values[0].float()
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("hd,hdt->ht", query.float(), keys)[:, first:end] * scale
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, first:end])


def tokens(count, heads, dtype, seed=5):
    return torch.randn(count, heads, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "query_heads"), [(3, 3), (2, 6)])
def test_it_is_attention(dtype, heads, query_heads):
    cache = filled_cache(heads, dtype)
    table = ints([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    owners, firsts, ends = [0, 1, 1, 1, 2], [0, 3, 40, 40, 0], [1, 33, 64, 65, 96]
    query = tokens(5, query_heads, dtype)
    output = kernel.attend(cache, 0, table, ints(owners), ints(firsts), ints(ends), query, None, 0.3)
    for i, (owner, first, end) in enumerate(zip(owners, firsts, ends, strict=True)):
        expected = reference(cache, table, owner, first, end, query[i], 0.3)
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(output[i].float(), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "query_heads"), [(3, 3), (2, 6)])
def test_a_token_alone_gets_the_bits_that_it_gets_among_others(dtype, heads, query_heads):
    table = ints([[1, 2, 3, 4], [5, 6, 7, 8]])
    count = 75
    query, key, value = (
        tokens(count, query_heads, dtype),
        tokens(count, heads, dtype, 6),
        tokens(count, heads, dtype, 7),
    )
    ends = list(range(20, 20 + count))
    whole_cache, single_cache = filled_cache(heads, dtype), filled_cache(heads, dtype)
    whole = kernel.attend(
        whole_cache, 0, table, ints([1] * count), ints([0] * count), ints(ends), query, (key, value), 0.25
    )
    for i in range(count):
        one = slice(i, i + 1)
        single = kernel.attend(
            single_cache, 0, table, ints([1]), ints([0]), ints(ends[one]), query[one], (key[one], value[one]), 0.25
        )
        assert torch.equal(single[0], whole[i])
    assert torch.equal(single_cache.keys[0], whole_cache.keys[0])


def test_what_is_not_a_number_behind_a_token_is_not_read():
    cache = filled_cache(2, torch.float32)
    cache.values[0][1, :, 5:] = torch.nan
    cache.keys[0][1, :, :, 5:] = torch.nan
    output = kernel.attend(
        cache, 0, ints([[1]]), ints([0]), ints([0]), ints([5]), tokens(1, 2, torch.float32), None, 0.25
    )
    assert output.isfinite().all()
    assert BLOCK_TOKENS > 5
