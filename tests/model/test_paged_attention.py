"""Paged attention of every kind: the compiled kernel gives what plain torch gives, and caches of unlike layers."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.runners.attention import StepPlanner, paged_attention
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache, LayerShape
from headrace_predictor.engine.state.sequence import Row, detached_sequence

BLOCKS = 16


@dataclass(frozen=True)
class Case:
    """The heads of a layer, the kind of its scores, and the tokens of a step: decoding rows and chunks of prompts."""

    layer: LayerShape
    group: int
    cap: float
    has_sinks: bool
    reach: Reach
    decodes: list[int]
    chunks: list[tuple[int, int]]

    def attend(self, cache):
        rows = [row_of(start, 1, index) for index, start in enumerate(self.decodes)]
        rows += [row_of(start, count, len(rows) + i) for i, (start, count) in enumerate(self.chunks)]
        plan = StepPlanner(cache).plan(rows)
        count, generator = len(plan.owners), torch.Generator().manual_seed(1)
        heads, size, value_size, _ = self.layer

        def numbers(heads, size):
            return torch.randn(1, count, heads, size, generator=generator).transpose(1, 2)

        queries, keys, values = numbers(heads * self.group, size), numbers(heads, size), numbers(heads, value_size)
        sinks = 2 * torch.randn(heads * self.group, generator=generator)
        module = SimpleNamespace(layer_idx=1, reach=self.reach)
        scores = {"softcap": self.cap or None, "s_aux": sinks if self.has_sinks else None}
        with plan.current():
            return paged_attention(module, queries, keys, values, None, scaling=0.4, **scores)[0]


CASES = st.builds(
    Case,
    layer=st.builds(
        LayerShape,
        heads=st.integers(1, 3),
        key_size=st.sampled_from([8, 24, 64]),
        value_size=st.sampled_from([8, 16, 64]),
        source=st.none(),
    ),
    group=st.integers(1, 4),
    cap=st.sampled_from([0.0, 1.5, 50.0]),
    has_sinks=st.booleans(),
    reach=st.sampled_from([Reach(), Reach(window=20), Reach(chunk=24)]),
    decodes=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 50)), max_size=2),
)


def row_of(start, count, index):
    sequence = detached_sequence([5] * (start + count))
    sequence.blocks = list(range(1 + 3 * index, 4 + 3 * index))
    return Row(sequence, start, count)


def cache_of(layer):
    """A cache with a layer of other heads on both sides, filled with random numbers."""
    other = LayerShape(2, 16, 40)
    shape = CacheShape(3, 2, 16, torch.float32, (other, layer, other))
    cache = KeyValueCache(shape, BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return cache


@given(case=CASES)
def test_the_kernel_gives_what_plain_torch_gives(case):
    caches = [cache_of(case.layer) for _ in range(2)]
    compiled = case.attend(caches[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "takes", lambda query: False)
        plain = case.attend(caches[1])
    torch.testing.assert_close(compiled, plain, atol=2e-5, rtol=2e-5)
    for one, other in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert torch.equal(one, other)


def test_a_sink_takes_its_share_and_a_cap_bounds_the_scores():
    layer = LayerShape(1, 8, 8)
    whole = Case(layer, 1, 0.0, False, Reach(), [40], []).attend(cache_of(layer))
    for changed in ({"cap": 0.1}, {"has_sinks": True}):
        case = Case(**{**vars(Case(layer, 1, 0.0, False, Reach(), [40], [])), **changed})
        assert (case.attend(cache_of(layer)) - whole).abs().max() > 1e-2


SHAPES = st.lists(
    st.builds(
        LayerShape,
        heads=st.integers(1, 4),
        key_size=st.sampled_from([8, 16, 24]),
        value_size=st.sampled_from([8, 40]),
        source=st.none(),
    ),
    min_size=1,
    max_size=6,
)


@given(own=SHAPES)
def test_no_two_layers_have_the_same_place(own):
    shape = CacheShape(len(own), 1, 8, torch.float32, tuple(own))
    cache = KeyValueCache(shape, 3, torch.device("cpu"))
    places = torch.full((BLOCK_TOKENS,), 1), torch.arange(BLOCK_TOKENS)
    written = []
    for layer, (heads, size, value_size, _) in enumerate(own):
        keys = torch.full((BLOCK_TOKENS, heads, size), 1.0 + layer)
        values = torch.full((BLOCK_TOKENS, heads, value_size), -1.0 - layer)
        cache.write(layer, places, keys, values)
        written.append((keys, values))
    for layer, (keys, values) in enumerate(written):
        assert torch.equal(cache.keys[layer][1].permute(2, 0, 1), keys)
        assert torch.equal(cache.values[layer][1].transpose(0, 1), values)
        for stored in (cache.keys[layer], cache.values[layer]):
            assert not stored[0].any()
            assert not stored[2].any()
    assert shape.bytes_per_token >= 4 * sum(heads * (size + value_size) for heads, size, value_size, _ in own)


def test_layers_that_read_another_layers_take_no_memory():
    own = LayerShape(2, 16, 16)
    shared = CacheShape(3, 2, 16, torch.float32, (own, own, own._replace(source=0)))
    assert shared.bytes_per_token == CacheShape(2, 2, 16, torch.float32).bytes_per_token
    cache = KeyValueCache(shared, 2, torch.device("cpu"))
    cache.keys[0].fill_(1)
    assert cache.keys[2].all()
    assert not cache.keys[1].any()
    assert cache.arrays[2].key_slot == cache.arrays[0].key_slot


def test_unlike_sizes_of_keys_and_values_waste_little():
    """As of DeepSeek V2 Lite."""
    own = LayerShape(16, 192, 128)
    shape = CacheShape(27, 16, 192, torch.bfloat16, (own,) * 27)
    assert shape.bytes_per_token < 1.03 * 27 * 16 * (192 + 128) * 2
