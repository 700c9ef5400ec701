"""Steps with prompts have few sizes, none much larger than its number of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_predictor.engine.cpu.step_sizes import size_above, size_below

TOKENS = st.integers(1, 4096)


@given(TOKENS)
def test_a_number_of_tokens_lies_between_two_sizes(tokens):
    below, above = size_below(tokens), size_above(tokens)
    assert below <= tokens <= above
    assert above - below in (0, 8, 16, 32)


@given(TOKENS)
def test_the_size_of_a_size_is_itself(tokens):
    assert size_above(size_above(tokens)) == size_above(tokens)
    assert size_below(size_above(tokens)) == size_above(tokens)


def test_there_are_few_sizes():
    assert len({size_above(tokens) for tokens in range(1, 2049)}) < 100
