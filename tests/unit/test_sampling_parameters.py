"""Sampling parameters: one table, refused with a clear text wherever they come from."""

import pytest

from millrace.errors import InvalidRequestError
from millrace.protos import inference_pb2
from millrace.sampling import SamplingParameters, defaults_of, parameters_of, set_parameters


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
    ],
)
def test_what_is_wrong_is_named(given, text):
    with pytest.raises(InvalidRequestError, match="^" + text.replace(".", r"\.")):
        SamplingParameters().changed(given)


def test_numbers_may_come_as_text():
    changed = SamplingParameters().changed({"temperature": "0.5", "max_tokens": "7", "ignore_eos": "true"})
    assert (changed.temperature, changed.max_tokens, changed.ignore_eos) == (0.5, 7, True)


def test_max_tokens_defaults_to_what_the_context_has_left():
    assert SamplingParameters().resolved(room=1000).max_tokens == 256
    assert SamplingParameters().resolved(room=20).max_tokens == 20
    with pytest.raises(InvalidRequestError, match="has room for 20"):
        SamplingParameters(max_tokens=21).resolved(room=20)
    with pytest.raises(InvalidRequestError, match="no room is left"):
        SamplingParameters().resolved(room=0)


def test_a_seed_is_chosen_where_none_is_given():
    seeds = {SamplingParameters().resolved(10).seed for _ in range(5)}
    assert len(seeds) == 5
    assert SamplingParameters(seed=4).resolved(10).seed == 4


def test_a_models_own_generation_config_counts_where_it_samples():
    assert defaults_of({"do_sample": True, "temperature": 0.6, "top_k": 20}, False).temperature == 0.6
    assert defaults_of({}, False).temperature == 1.0
    assert defaults_of({}, True).temperature == 0.0
    assert defaults_of({"do_sample": False, "temperature": 0.6}, False).temperature == 0.0


def test_parameters_survive_the_wire():
    request = inference_pb2.ModelInferRequest()
    values = {"max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "seed": 2**64 - 1, "top_k": -1}
    set_parameters(request.parameters, values | {"stop": None})
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    assert parameters_of(request.parameters) == values
