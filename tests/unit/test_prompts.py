import pytest

from millrace.errors import InvalidRequestError
from millrace.sampling import ContextLimits
from services.transformer.generation.prompts import kept_tokens


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"), [(5, 90, 5), (100, None, 100), (-1, 20, 80), (-1, None, 99), (-1, 500, 1)]
)
def test_the_answer_has_room_behind_a_truncated_prompt(limit, max_tokens, kept):
    assert kept_tokens(limit, ContextLimits(100, is_encoder_decoder=False), max_tokens) == kept


def test_a_prompt_of_its_own_limit_may_fill_it():
    assert kept_tokens(-1, ContextLimits(100, is_encoder_decoder=True), 20) == 100


def test_a_limit_beyond_the_context_is_refused():
    with pytest.raises(InvalidRequestError) as raised:
        kept_tokens(101, ContextLimits(100, is_encoder_decoder=False), None)
    assert raised.value.param == "truncate_prompt_tokens"
