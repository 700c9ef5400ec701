"""Steps with prompts have few sizes, and none is much larger than what it computes."""

from hypothesis import given
from hypothesis import strategies as st

from services.predictor.engine.cpu.step_sizes import size_above, size_below

TOKENS = st.integers(1, 4096)


@given(TOKENS)
def test_sizes_enclose_a_number_of_tokens(tokens):
    below, above = size_below(tokens), size_above(tokens)
    assert below <= tokens <= above
    assert above - below in (0, 8, 16, 32)


@given(TOKENS)
def test_a_size_is_its_own(tokens):
    assert size_above(size_above(tokens)) == size_above(tokens)
    assert size_below(size_above(tokens)) == size_above(tokens)


def test_there_are_few():
    assert len({size_above(tokens) for tokens in range(1, 2049)}) < 100
