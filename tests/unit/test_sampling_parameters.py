"""Sampling parameters: one table for every protocol; wrong values are refused by name."""

import re

import pytest

from headrace.errors import InvalidRequestError
from headrace.oip.parameters import read_sampling, set_parameters
from headrace.sampling import SamplingParameters, defaults_of
from headrace_protos import inference_pb2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: Input should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature=nan: Input should be a finite number"),
        ({"temperature": "warm"}, "temperature='warm': Input should be a valid number"),
        ({"temperature": True}, "temperature=True: a number is needed"),
        ({"top_p": 0}, "top_p=0: Input should be greater than 0"),
        ({"top_p": 1.5}, "top_p=1.5: Input should be less than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens=0: Input should be greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: Input should be a valid integer"),
        ({"temprature": 1}, "unknown parameter 'temprature'"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: a list of token ids is needed"),
        ({"stop_token_ids": [True]}, "stop_token_ids=[True]: a list of token ids is needed"),
        ({"stop_token_ids": "[1, 2"}, "stop_token_ids='[1': Input should be a valid integer"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids=-1: Input should be greater than or equal to 0"),
        (
            {"stop_token_ids": list(range(65))},
            "stop_token_ids=[0, 1, 2, 3, 4, 5, ...]: Tuple should have at most 64 items",
        ),
        (
            {"stop_token_ids": "1," * 10_000},
            "stop_token_ids='1,1,1,1,1,1,...,1,1,1,1,1,1,': a list of token ids is needed",
        ),
        ({"logit_bias": {"5": 101}}, "logit_bias=101: Input should be less than or equal to 100"),
        ({"logit_bias": {"5": True}}, "logit_bias={'5': True}: an object of token ids and numbers is needed"),
        ({"logit_bias": {"five": 1}}, "logit_bias='five': Input should be a valid integer"),
        ({"logit_bias": "{5"}, "logit_bias='{5': an object of token ids and numbers is needed"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias={0: 1, 1: 1, 2: 1, 3: 1, ...}: Dictionary should"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1: Input should be greater than or equal to 0"),
        (
            {"allowed_token_ids": [1] * 1025},
            "allowed_token_ids=[1, 1, 1, 1, 1, 1, ...]: Tuple should have at most 1024",
        ),
        ({"bad_token_ids": [5]}, "bad_token_ids=[5]: a list of lists of token ids is needed"),
        ({"bad_token_ids": [[]]}, "bad_token_ids=[]: Tuple should have at least 1 item"),
        (
            {"bad_token_ids": [[5]] * 129},
            "bad_token_ids=[[5], [5], [5], [5], [5], [5], ...]: Tuple should have at most",
        ),
        ({"bad_token_ids": [[5] * 4097]}, "bad_token_ids=[[5, 5, 5, 5, 5, 5, ...]]: at most 4096 token ids together"),
        ({"priority": 2**31}, "priority=2147483648: Input should be less than 2147483648"),
        ({"priority": -(2**31) - 1}, "priority=-2147483649: Input should be greater than or equal to -2147483648"),
        ({"pace": 4.9}, "pace=4.9: 5 or more is needed: a running sequence holds its place"),
        ({"priority": 0.5}, "priority=0.5: Input should be a valid integer"),
        ({"top_logprobs": 21}, "top_logprobs=21: Input should be less than or equal to 20"),
        (
            {"cache_salt": "x" * 257},
            "cache_salt='xxxxxxxxxxxx...xxxxxxxxxxxxx': String should have at most 256 characters",
        ),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(given, text):
    with pytest.raises(InvalidRequestError, match="^" + re.escape(text)):
        SamplingParameters().changed(given)


def test_numbers_may_be_given_as_text():
    changed = SamplingParameters().changed({"temperature": "0.5", "max_tokens": "7", "ignore_eos": "true"})
    assert (changed.temperature, changed.max_tokens, changed.ignore_eos) == (0.5, 7, True)


@pytest.mark.parametrize("given", [[1, 22], (1, 22), "[1, 22]", "1,22", " 1 , 22 ", ["1", 22]])
def test_stop_token_ids_may_be_a_list_or_its_text(given):
    assert SamplingParameters().changed({"stop_token_ids": given}).stop_token_ids == (1, 22)


def test_restrictions_may_be_json_text():
    text = {"logit_bias": '{"5": -1.5}', "allowed_token_ids": "[1, 2]", "bad_token_ids": "[[3, 4], [5]]"}
    changed = SamplingParameters().changed(text)
    assert (changed.logit_bias, changed.allowed_token_ids) == ({5: -1.5}, (1, 2))
    assert changed.bad_token_ids == ((3, 4), (5,))
    assert changed.has_restrictions
    assert not changed.changed({"logit_bias": {}, "allowed_token_ids": [], "bad_token_ids": []}).has_restrictions


@pytest.mark.parametrize("given", ["", "[]", []])
def test_stop_token_ids_may_be_empty(given):
    assert SamplingParameters(stop_token_ids=(3,)).changed({"stop_token_ids": given}).stop_token_ids == ()


def test_top_logprobs_need_logprobs():
    with pytest.raises(InvalidRequestError, match="top_logprobs=2 needs logprobs"):
        SamplingParameters(top_logprobs=2).resolved(room=10)
    assert SamplingParameters(top_logprobs=2, logprobs=True).resolved(room=10).top_logprobs == 2


def test_end_and_stop_tokens_finish_a_sequence_that_may_end():
    def reason(token_id, produced=5, **parameters):
        sampling = SamplingParameters(**{"max_tokens": 10, "stop_token_ids": [7], **parameters})
        return sampling.finish_reason(token_id, produced, sampling.end_ids(frozenset({2})))

    assert (reason(2), reason(7), reason(3)) == ("stop", "stop", None)
    assert (reason(2, ignore_eos=True), reason(7, ignore_eos=True)) == (None, "stop")
    # The first min_tokens end nothing; the one after them may.
    assert (reason(2, min_tokens=6), reason(7, min_tokens=6)) == (None, None)
    assert (reason(2, min_tokens=5), reason(7, min_tokens=5)) == ("stop", "stop")
    assert (reason(3, produced=8), reason(3, produced=9), reason(7, produced=9)) == (None, "length", "stop")


def test_max_tokens_defaults_to_the_rest_of_the_context():
    assert SamplingParameters().resolved(room=1000).max_tokens == 256
    assert SamplingParameters().resolved(room=20).max_tokens == 20
    with pytest.raises(InvalidRequestError, match="has room for 20"):
        SamplingParameters(max_tokens=21).resolved(room=20)
    with pytest.raises(InvalidRequestError, match="no room is left"):
        SamplingParameters().resolved(room=0)


def test_a_minimum_holds_up_to_the_end_of_the_context_where_no_maximum_is_given():
    summaries = defaults_of({"min_length": 56}, is_encoder_decoder=True).changed({})
    lengths = [(made.min_tokens, made.max_tokens) for made in (summaries.resolved(1000, 16), summaries.resolved(9, 16))]
    assert lengths == [(55, 55), (9, 9)]
    with pytest.raises(InvalidRequestError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParameters(min_tokens=5, max_tokens=4).resolved(9)


def test_a_seed_is_chosen_where_none_is_given():
    seeds = {SamplingParameters().resolved(10).seed for _ in range(5)}
    assert len(seeds) == 5
    assert SamplingParameters(seed=4).resolved(10).seed == 4


def test_a_models_generation_config_sets_the_defaults_where_it_samples():
    assert defaults_of({"do_sample": True, "temperature": 0.6, "top_k": 20}, False).temperature == 0.6
    assert defaults_of({}, False).temperature == 1.0
    assert defaults_of({}, True).temperature == 0.0
    assert defaults_of({"do_sample": False, "temperature": 0.6}, False).temperature == 0.0


def test_parameters_are_equal_after_encoding_and_decoding():
    request = inference_pb2.ModelInferRequest()
    values = {"max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "seed": 2**64 - 1, "top_k": -1}
    set_parameters(request.parameters, values | {"stop": None})
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert read_sampling(request.parameters) == values


def test_every_parameter_is_equal_after_encoding_and_decoding():
    request = inference_pb2.ModelInferRequest()
    given = SamplingParameters(
        max_tokens=3,
        seed=2**64 - 1,
        stop_token_ids=[5, 6],
        top_logprobs=3,
        logprobs=True,
        cache_salt="[a] ü",
        logit_bias={5: -2.5, 6: 100},
        allowed_token_ids=[7],
        bad_token_ids=[[7, 8], [9]],
    )
    set_parameters(request.parameters, given.model_dump(exclude_none=True))
    assert SamplingParameters().changed(read_sampling(request.parameters)) == given
