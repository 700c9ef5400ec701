"""Requests, arguments and the choice of the engine, converted for vLLM; needs no vLLM."""

import json

import pytest

from headrace.errors import InvalidRequestError, StartupError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.state.sequence import Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.vllm_engine.parameters import vllm_request
from headrace_predictor.vllm_engine.settings import VllmSettings, engine_arguments
from tests.support.requests import submission

EOS = frozenset({2})


def converted(output_ids=(), client="", end_id=2, **sampling):
    parameters = SamplingParameters(**{"max_tokens": 20, "seed": 7, **sampling})
    request = submission("r", [5, 6], parameters, list(output_ids), client=client)
    sequence = Sequence(request, MergingSlot(parameters), EOS)
    return vllm_request(sequence, EOS, end_id)


def arguments(known=("max_model_len", "tensor_parallel_size"), platform="cpu", elsewhere=0.0, **given):
    settings = VllmSettings.model_validate_json(PredictorSettings(**given).model_dump_json())
    return engine_arguments(settings, known, platform, elsewhere)


def test_every_parameter_has_its_counterpart():
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "min_tokens": 3,
        "logit_bias": {5: -1.5},
        "allowed_token_ids": [5, 6],
    }
    request = converted(**given, stop_token_ids=(9,), logprobs=True, top_logprobs=4)
    assert given.items() <= request.sampling.items()
    assert request.prompt_ids == [5, 6]
    assert request.sampling["max_tokens"] == 20
    assert request.sampling["seed"] == 7
    assert request.sampling["stop_token_ids"] == [2, 9]
    assert request.sampling["logprobs"] == 4
    assert request.sampling["detokenize"] is False


def test_bad_words_are_refused_by_name():
    assert converted().sampling["logit_bias"] is converted().sampling["allowed_token_ids"] is None
    with pytest.raises(InvalidRequestError, match="not supported with vLLM") as raised:
        converted(bad_token_ids=[[5]])
    assert raised.value.param == "bad_words"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"grammar": 'start: "a"'}, {"grammar": '%llguidance {}\nstart: "a"'}),
        ({"grammar": '%llguidance {}\nstart: "a"'}, {"grammar": '%llguidance {}\nstart: "a"'}),
    ],
)
def test_a_form_has_its_counterpart(form, expected):
    request = converted(structured_outputs=form)
    assert request.sampling["structured_outputs"] == expected
    assert (request.sampling["stop_token_ids"], request.sampling["logit_bias"]) == ([2], None)


def test_json_has_the_whitespace_of_the_own_engine():
    schema = {"type": "string", "x-guidance": {"lenient": True}}
    given = converted(structured_outputs={"json": schema}).sampling["structured_outputs"]["json"]
    options = {"lenient": False, "whitespace_flexible": True, "whitespace_pattern": "( |\\r?\\n[ \\t]{0,32})"}
    assert json.loads(given) == {"type": "string", "x-guidance": options}
    given = converted(structured_outputs={"json_object": True, "disable_any_whitespace": True})
    options = {"lenient": False, "whitespace_flexible": False}
    assert json.loads(given.sampling["structured_outputs"]["json"]) == {"type": "object", "x-guidance": options}


def test_an_end_token_that_is_ignored_is_the_last_resort_of_a_form():
    request = converted(structured_outputs={"regex": "a+"}, logit_bias={5: 1.0}, ignore_eos=True)
    assert (request.sampling["stop_token_ids"], request.sampling["logit_bias"]) == ([2], {5: 1.0, 2: -1e9})
    request = converted(structured_outputs={"regex": "a+"}, end_id=3)
    assert (request.sampling["stop_token_ids"], request.sampling["logit_bias"]) == ([2, 3], None)


def test_greedy_answers_have_no_generator_and_no_end_token_if_it_is_ignored():
    request = converted(temperature=1e-6, ignore_eos=True)
    assert (request.sampling["temperature"], request.sampling["seed"]) == (0.0, None)
    assert request.sampling["stop_token_ids"] == []
    assert request.sampling["logprobs"] is None


def test_no_seed_is_negative():
    assert converted(seed=-1).sampling["seed"] == converted(seed=2**64 - 1).sampling["seed"] == 2**63 - 1
    assert converted(seed=2**63 - 5).sampling["seed"] == 2**63 - 5


def test_a_greedy_answer_continues_after_its_tokens():
    request = converted([7, 8, 9], temperature=0.0, min_tokens=5)
    assert (request.prompt_ids, request.repeated) == ([5, 6, 7, 8, 9], ())
    assert (request.sampling["max_tokens"], request.sampling["min_tokens"]) == (17, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "structured_outputs": {"choice": ["a"]}},
    ],
    ids=["sampled", "penalty", "structured"],
)
def test_an_answer_that_depends_on_its_output_is_repeated(fields):
    request = converted([7, 8, 9], **fields)
    assert (request.prompt_ids, request.repeated) == ([5, 6], (7, 8, 9))
    assert request.sampling["max_tokens"] == 20


def test_prefixes_are_shared_within_a_client_and_a_salt():
    assert converted().cache_salt is None
    salts = {converted(client=client, cache_salt=salt).cache_salt for client in "ab" for salt in ("", "x")}
    assert len(salts) == 4


def test_arguments_follow_from_the_settings_and_may_replace_them():
    usual = arguments(max_running=7, max_context=99, kv_cache_memory="1MiB", step_tokens=16)
    assert usual == {
        "dtype": "float32",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 16,
        "gpu_memory_utilization": 0.85,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "max_model_len": 99,
        "kv_cache_memory_bytes": 1 << 20,
    }
    given = arguments(vllm_arguments={"max_model_len": 5, "tensor_parallel_size": 2}, max_context=99)
    assert (given["max_model_len"], given["tensor_parallel_size"]) == (5, 2)


def test_on_a_gpu_the_cache_is_what_other_engines_leave():
    given = arguments(platform="cuda", elsewhere=0.25)
    assert "kv_cache_memory_bytes" not in given
    assert (given["dtype"], given["gpu_memory_utilization"]) == ("auto", pytest.approx(0.6))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vllm_arguments": {"max_model_length": 5}}, "PREDICTOR_VLLM_ARGUMENTS: .*'max_model_length'"),
        ({"vllm_arguments": {"trust_remote_code": True}}, "PREDICTOR_VLLM_ARGUMENTS: trust_remote_code"),
        ({"vllm_arguments": {"structured_outputs_config": {}}}, "PREDICTOR_VLLM_ARGUMENTS: structured_outputs_config"),
        ({"device": "cuda"}, "PREDICTOR_DEVICE=cuda: this vLLM is built for cpu"),
        ({"dtype": "fp64"}, "PREDICTOR_DTYPE=fp64"),
    ],
    ids=["unknown", "reserved", "forms", "device", "dtype"],
)
def test_wrong_settings_are_one_line(given, message):
    with pytest.raises(StartupError, match=message):
        arguments(**given)


@pytest.mark.parametrize(
    ("text", "chat", "other", "encoder_decoder"),
    [
        ("headrace", "headrace", "headrace", "headrace"),
        ("vllm", "vllm", "vllm", "headrace"),
        ("chat=vllm", "vllm", "headrace", "headrace"),
        ("vllm, chat=headrace", "headrace", "vllm", "headrace"),
    ],
)
def test_each_model_has_its_engine(text, chat, other, encoder_decoder):
    engines = PredictorSettings(engine=text).engine
    assert (engines.of("chat"), engines.of("other")) == (chat, other)
    assert engines.of("other", is_encoder_decoder=True) == encoder_decoder


@pytest.mark.parametrize("text", ["vlm", "chat=vlm", "=vllm,chat"])
def test_an_unknown_engine_is_refused(text):
    with pytest.raises(ValueError, match="names no engine"):
        PredictorSettings(engine=text)
