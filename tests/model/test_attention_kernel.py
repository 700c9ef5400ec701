"""The compiled attention: right, and the same to the last bit whatever stands beside a token."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from services.predictor.engine.cpu import kernel
from services.predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache

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
    output = kernel.attend(cache, 0, table, ints(owners), ints(firsts), ints(ends), query, query_heads, 0.3)
    for i, (owner, first, end) in enumerate(zip(owners, firsts, ends, strict=True)):
        expected = reference(cache, table, owner, first, end, query[i], 0.3)
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
        torch.testing.assert_close(output[i].float(), expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "query_heads"), [(3, 3), (2, 6)])
def test_a_token_alone_gets_the_bits_that_it_gets_among_others(dtype, heads, query_heads):
    table = ints([[1, 2, 3, 4], [5, 6, 7, 8]])
    count = 75
    packed = tokens(count, query_heads + 2 * heads, dtype)
    ends = list(range(20, 20 + count))
    whole_cache, single_cache = filled_cache(heads, dtype), filled_cache(heads, dtype)
    firsts = ints([0] * count)
    whole = kernel.attend(whole_cache, 0, table, ints([1] * count), firsts, ints(ends), packed, query_heads, 0.25)
    for i in range(count):
        one = slice(i, i + 1)
        single = kernel.attend(
            single_cache, 0, table, ints([1]), firsts[one], ints(ends[one]), packed[one], query_heads, 0.25
        )
        assert torch.equal(single[0], whole[i])
    assert torch.equal(single_cache.keys[0], whole_cache.keys[0])


def test_what_is_not_a_number_behind_a_token_is_not_read():
    cache = filled_cache(2, torch.float32)
    cache.values[0][1, :, 5:] = torch.nan
    cache.keys[0][1, :, :, 5:] = torch.nan
    output = kernel.attend(cache, 0, ints([[1]]), ints([0]), ints([0]), ints([5]), tokens(1, 2, torch.float32), 2, 0.25)
    assert output.isfinite().all()
    assert BLOCK_TOKENS > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_rotated_as_transformers_rotates_them(dtype):
    count, heads = 5, 2
    angles = torch.rand(1, count, SIZE // 2).repeat(1, 1, 2) * 6
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, value = (tokens(count, heads, dtype, seed) for seed in (5, 6, 7))
    turned = apply_rotary_pos_emb(query[None], key[None], *rotary, unsqueeze_dim=2)
    plan = ints([[1]]), ints([0] * count), ints([0] * count), ints(range(1, count + 1))
    expected_cache, cache = filled_cache(heads, dtype), filled_cache(heads, dtype)
    expected = kernel.attend(expected_cache, 0, *plan, torch.cat((turned[0][0], turned[1][0], value), 1), heads, 0.25)
    got = kernel.attend(
        cache, 0, *plan, torch.cat((query, key, value), 1), heads, 0.25, rotary=(rotary[0][0], rotary[1][0])
    )
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(got, expected, **tolerance)
    torch.testing.assert_close(cache.keys[0], expected_cache.keys[0], **tolerance)
    assert torch.equal(cache.values[0], expected_cache.values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_transformers_and_a_rows_own(dtype):
    norm = LlamaRMSNorm(72, eps=1e-5).to(dtype)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 9, 72, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode():
        got = kernel.rms_norm(x, norm.weight, norm.variance_epsilon)
        torch.testing.assert_close(got, norm(x), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(kernel.rms_norm(x[:, 3:4], norm.weight, norm.variance_epsilon), got[:, 3:4])
