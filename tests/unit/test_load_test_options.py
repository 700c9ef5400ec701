"""How the load test reads its fields, prompts, tensors and pages."""

import json
from argparse import ArgumentParser, Namespace

import pytest

from headrace_protos.inference_pb2 import ModelMetadataResponse
from loadtest.gateway import GatewayError, PredictorState, parse_address, states_of
from loadtest.options import add_fields, parse
from loadtest.prompts import Prompt, Workload, read_prompts, replayed, with_inputs


class Parser(ArgumentParser):
    """Accepts the arguments of Locust's own parser."""

    def add_argument(self, *arguments, include_in_web_ui=True, is_secret=False, **more):
        return super().add_argument(*arguments, **more)


def given(*arguments, models=()):
    parser = Parser()
    add_fields(parser, models)
    return parser.parse_args(arguments)


def test_the_defaults_are_closed_load_with_an_objective():
    options = parse(given())
    assert (options.model, options.arrivals, options.kills_per_minute) == ("", None, 0)
    assert options.think_time == (0.1, 0.5)
    assert str(options.objective) == "TTFT <= 1000 ms, gap <= 200 ms"
    assert options.workload.output == (16, 64)


def test_open_load_and_arrivals_of_the_log():
    assert parse(given("--arrivals", "2.5")).arrivals == 2.5
    assert parse(given("--arrivals", "log")).arrivals == "log"


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("arrivals", "0", "arrivals: '0'"),
        ("arrivals", "nan", "arrivals: 'nan'"),
        ("think_time", "2-1", "think time: '2-1'"),
        ("output_tokens", "0", "output tokens: '0'"),
        ("output_tokens", "9-3", "output tokens: '9-3'"),
        ("prompt_words", "many", "prompt words: 'many'"),
        ("tensor_shape", "1,-1", "tensor shape: '1,-1'"),
        ("deadline", "soon", "deadline: 'soon'"),
        ("good_percent", "101", "good percent: '101'"),
        ("knee_precision", "51", "knee precision: '51'"),
        ("kills_per_minute", "-1", "kills per minute: '-1'"),
        ("objective", "fast", "objective: 'fast'"),
        ("prompts_file", "/does/not/exist", "prompts file: '/does/not/exist'"),
    ],
)
def test_a_malformed_field_is_named(field, value, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(Namespace(**{**vars(given()), field: value}))


def test_prompts_of_json_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one", "max_tokens": 7}, {"messages": [{"role": "user", "content": "two"}]}, {"other": 1}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(file) == [Prompt("one", 7), Prompt("two")]
    assert Workload((3, 3), prompts=[Prompt("one", 7)]).draw() == ("one", 7)
    assert Workload((3, 3), prompts=[Prompt("two")]).draw() == ("two", 3)


def test_prompts_of_share_gpt(tmp_path):
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "one two three"}]
    file.write_text(json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": turns[:1]}]))
    assert read_prompts(file) == [Prompt("Hello?", 4)]


@pytest.mark.parametrize("text", ["", "[]", "no json", "[1]", '{"prompt": ""}'])
def test_a_file_without_prompts_is_refused(tmp_path, text):
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"cannot be read|has no prompts"):
        read_prompts(file)


def test_arrivals_of_records_are_in_order_and_without_those_that_have_no_prompt():
    records = [
        {"time": "2026-01-01T00:00:02.500Z", "prompt": "b", "usage": {"completion_tokens": 9}},
        {"time": "2026-01-01T00:00:01Z"},
        {"time": "2026-01-01T00:00:01Z", "prompt": "a"},
    ]
    assert replayed(records) == [(0.0, Prompt("a")), (1.5, Prompt("b", 9))]
    assert replayed([]) == []


def test_a_model_of_an_unknown_type_is_refused():
    with pytest.raises(GatewayError, match="x of m is BF16"):
        with_inputs(ModelMetadataResponse(name="m", inputs=[{"name": "x", "datatype": "BF16", "shape": [1]}]), (1,))


def test_addresses():
    assert parse_address("https://models.example").target == "models.example:443"
    assert parse_address("http://[::1]:8080/").url == "http://[::1]:8080"
    with pytest.raises(ValueError, match="is not http"):
        parse_address("localhost:8080")


def test_a_predictors_state_sums_up_its_models():
    first = {"model": "a", "running": 3, "waiting": 2, "waiting_tokens": 9, "cache_free": 0.75}
    second = {"model": "b", "running": 1, "waiting": 0, "waiting_tokens": 0, "cache_free": 0.5}
    ready = {"name": "predictor-1", "ready": True, "leaving": False, "models": [first, second]}
    # Ready with models that the key may not use.
    unseen = {"name": "predictor-2", "ready": True, "leaving": False, "models": []}
    starting = {"name": "predictor-3", "ready": False, "leaving": False, "models": []}
    assert states_of([ready, unseen, starting]) == {
        "predictor-1": PredictorState(4, 2, 0.5),
        "predictor-2": PredictorState(0, 0, 0),
    }
