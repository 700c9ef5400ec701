"""The compiled attention: correct, and the same to the last bit whatever else the step computes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.kernel import Buffer
from headrace_predictor.engine.cpu.vectors import exponentiate
from headrace_predictor.engine.state.attention import Range, Scores
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache, LayerShape
from tests.support.threads import torch_threads

SIZE = 16
BLOCKS = 12


def filled_cache(heads, dtype, size=SIZE, value_size=None):
    own = (LayerShape(heads, size, value_size or size),)
    cache = KeyValueCache(CacheShape(1, heads, size, dtype, own), BLOCKS + 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


def attend(cache, ranges, packed, query_heads, scale, **scores):
    output = Buffer((len(packed), query_heads, cache.values[0].shape[-1]), packed.dtype)
    layer = kernel.Attention(query_heads, Scores(scale, **scores))
    return layer(cache.arrays[0], Range(*ranges), packed, output).view(output.array.shape)


def rms_norm(norm, x):
    return kernel.RmsNorm(norm)(x, Buffer(x.shape, x.dtype))


def reference(cache, table, owner, first, end, query, scale, bias=None, by_position=False):
    keys, values = cache.read(0, table[owner : owner + 1])
    keys, values = keys[0].float(), values[0].float()
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("hd,hdt->ht", query.float(), keys)[:, first:end] * scale
    if bias is not None:
        places = torch.arange(first, end) - (0 if by_position else end - bias.shape[1])
        scores += bias[:, places.clamp(min=0)]
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values[:, first:end])


def tokens(count, heads, dtype, seed=5, size=SIZE):
    return torch.randn(count, heads, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("biases", "by_position"), [(0, False), (40, False), (96, False), (96, True)])
@pytest.mark.parametrize(("heads", "query_heads"), [(3, 3), (2, 6)])
def test_it_computes_attention_in_bfloat16(heads, query_heads, biases, by_position):
    cache = filled_cache(heads, torch.bfloat16)
    table = ints([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    owners, firsts, ends = [0, 1, 1, 1, 2], [0, 3, 40, 40, 0], [1, 33, 64, 65, 96]
    query = tokens(5, query_heads, torch.bfloat16)
    bias = torch.randn(query_heads, biases, generator=torch.Generator().manual_seed(8)) if biases else None
    ranges = table, ints(owners), ints(firsts), ints(ends)
    output = attend(cache, ranges, query, query_heads, 0.3, bias=bias, by_position=by_position)
    for i, (owner, first, end) in enumerate(zip(owners, firsts, ends, strict=True)):
        expected = reference(cache, table, owner, first, end, query[i], 0.3, bias, by_position)
        torch.testing.assert_close(output[i].float(), expected, atol=1e-2, rtol=1e-2)


@dataclass(frozen=True)
class Prompt:
    """The end of a sequence, `count` tokens from `start` on, and the model's attention."""

    dtype: torch.dtype
    size: int
    heads: int
    group: int
    window: int
    biases: int
    by_position: bool
    start: int
    count: int
    value_size: int
    cap: float
    has_sinks: bool

    def attend(self, cache, first, end, beside=0):
        """Output for tokens [first, end), in a step that begins with a token of each of `beside` other sequences."""
        query_heads = self.heads * self.group
        width = (query_heads + self.heads) * self.size + self.heads * self.value_size
        packed = tokens(self.count, 1, self.dtype, size=width)[first:end]
        ends = torch.arange(first, end) + self.start + 1
        others = tokens(beside, 1, self.dtype, seed=6, size=width)
        other_ends = torch.arange(beside) + 20
        table = ints([*([[9 + i] * 8 for i in range(beside)]), [1, 2, 3, 4, 5, 6, 7, 8]])
        ends = torch.cat((other_ends, ends)).int()
        biases = 260 if self.by_position else self.biases
        bias = torch.randn(query_heads, biases, generator=torch.Generator().manual_seed(2))
        firsts = (ends - self.window).clamp(min=0) if self.window else torch.zeros_like(ends)
        output = attend(
            *(cache, (table, ints([*range(beside), *[beside] * (end - first)]), firsts, ends)),
            *(torch.cat((others, packed)), query_heads, self.size**-0.5),
            bias=bias if biases else None,
            by_position=self.by_position,
            cap=self.cap,
            sinks=torch.randn(query_heads, generator=torch.Generator().manual_seed(4)) if self.has_sinks else None,
        )
        return output[beside:]


PROMPTS = st.builds(
    Prompt,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([8, 16, 24, 40, 64, 128]),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 70]),
    window=st.sampled_from([0, 1, 31, 32, 33, 100]),
    biases=st.sampled_from([0, 0, 1, 40]),
    by_position=st.booleans(),
    start=st.integers(0, 100),
    count=st.integers(1, 150),
    value_size=st.sampled_from([8, 16, 64]),
    cap=st.sampled_from([0.0, 0.0, 2.0]),
    has_sinks=st.booleans(),
)


@given(prompt=PROMPTS, cut=st.integers(0, 150), beside=st.integers(0, 3), threads=st.integers(1, 2))
def test_a_token_gets_the_same_bits_alone_in_chunks_and_among_others(prompt, cut, beside, threads):
    caches = [filled_cache(prompt.heads, prompt.dtype, prompt.size, prompt.value_size) for _ in range(3)]
    alone = torch.cat([prompt.attend(caches[0], i, i + 1) for i in range(prompt.count)])
    with torch_threads(threads):
        whole = prompt.attend(caches[1], 0, prompt.count, beside)
        cut = min(cut, prompt.count)
        chunks = torch.cat((prompt.attend(caches[2], 0, cut, beside), prompt.attend(caches[2], cut, prompt.count)))
    assert torch.equal(whole, alone)
    assert torch.equal(chunks, alone)
    for cache in caches[1:]:
        assert torch.equal(cache.keys[0][1:9], caches[0].keys[0][1:9])
        assert torch.equal(cache.values[0][1:9], caches[0].values[0][1:9])


@njit
def exponentials(scores):
    return exponentiate(scores)


@given(
    scores=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=4).map(
        lambda numbers: np.resize(np.array(numbers, np.float32), 48)
    )
)
def test_weights_are_exponentials(scores):
    exact = np.exp(scores.astype(np.float64) - scores.max())
    total = exponentials(scores)
    np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1.2e-38)
    assert total == pytest.approx(exact.sum(), rel=1e-5)


@pytest.mark.parametrize("place", [0, 5, 31, 40])
def test_nan_is_not_hidden(place):
    for count in (1, 20):
        cache = filled_cache(2, torch.float32)
        cache.keys[0][1 + place // BLOCK_TOKENS, 0, 3, place % BLOCK_TOKENS] = torch.nan
        query = tokens(count, 2, torch.float32)
        ranges = ints([[1, 2]]), ints([0] * count), ints([0] * count), ints([41] * count)
        output = attend(cache, ranges, query, 2, 0.25)
        assert output[:, 0].isnan().all()
        assert output[:, 1].isfinite().all()


def test_nan_after_a_token_is_not_read():
    cache = filled_cache(2, torch.float32)
    cache.values[0][1, :, 5:] = torch.nan
    cache.keys[0][1, :, :, 5:] = torch.nan
    output = attend(cache, (ints([[1]]), ints([0]), ints([0]), ints([5])), tokens(1, 2, torch.float32), 2, 0.25)
    assert output.isfinite().all()
    assert BLOCK_TOKENS > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_equals_that_of_transformers_and_depends_on_its_row_only(dtype):
    norm = LlamaRMSNorm(72, eps=1e-5).to(dtype)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 72, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.inference_mode():
        got = rms_norm(norm, x)
        torch.testing.assert_close(got, norm(x), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(rms_norm(norm, x[3:4]), got[3:4])
