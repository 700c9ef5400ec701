"""The parameter `structured_outputs`: one form for every protocol, wrong ones refused by name."""

import json
import re
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.errors import InvalidRequestError
from headrace.oip.parameters import read_sampling, set_parameters
from headrace.sampling import SamplingParameters
from headrace.structured_outputs import MAX_BYTES, MAX_CHOICES, Constraint, constraint_of, read_structured_outputs
from headrace_predictor.engine.interface import sampling_of
from headrace_protos import inference_pb2
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.frontends.grpc.generate_json import read_generate_request
from headrace_transformer.frontends.openai.generation_requests import ChatCompletionRequest, CompletionRequest
from headrace_transformer.frontends.openai.models import FrontEnd
from headrace_transformer.frontends.openai.requests import parse

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}
KINDS = "exactly one of json, json_object, regex, choice, grammar is needed"


def sampling(value):
    return SamplingParameters().changed({"structured_outputs": value})


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"json": SCHEMA}, Constraint("json", SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, Constraint("json", SCHEMA)),
        ({"json": True}, Constraint("json", {})),
        ({"json_object": True, "disable_any_whitespace": True}, Constraint("json_object", True, True)),
        ({"regex": "[a-z]+", "json": None, "json_object": False}, Constraint("regex", "[a-z]+")),
        ({"choice": ["a", "b"]}, Constraint("choice", ["a", "b"])),
        ({"grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
    ],
)
def test_a_form_is_an_object_or_its_text(given, constraint):
    for value in (given, json.dumps(given)):
        text = sampling(value).structured_outputs
        assert constraint_of(text) == constraint
        assert sampling(text).structured_outputs == text
    # Through the parameters of an OIP request, and between the services.
    parameters = inference_pb2.ModelInferRequest().parameters
    set_parameters(parameters, {"structured_outputs": text})
    read = SamplingParameters().changed(read_sampling(parameters))
    assert SamplingParameters.model_validate_json(read.model_dump_json(exclude_defaults=True)) == read
    body = json.dumps({"model": "m", "structured_outputs": given}).encode()
    assert constraint_of(read_generate_request(body).structured_outputs) == constraint


def test_the_order_of_properties_is_kept():
    assert list(constraint_of(read_structured_outputs({"json": SCHEMA})).value["properties"]) == ["b", "a"]


@pytest.mark.parametrize("given", ["", None])
def test_no_form_is_no_constraint(given):
    assert sampling(given).structured_outputs == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, f"{KINDS}, there are 0"),
        ({"json_object": False}, f"{KINDS}, there are 0"),
        ({"regex": "a", "choice": ["a"]}, f"{KINDS}, there are 2"),
        ({"structural_tag": "{}"}, "'structural_tag' is not supported"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"json": [1]}, "json must be a JSON schema, as an object or its text"),
        ({"json": "{"}, "is not JSON"),
        ({"json": '{"maximum": NaN}'}, "is not JSON: expected value"),
        ({"json": "[" * 50_000}, "is not JSON: recursion limit exceeded"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": "\ud800"}, "has half of a surrogate pair"),
        ({"grammar": 5}, "grammar must be a text that is not empty"),
        ({"choice": []}, "choice must be a list of texts that is not empty"),
        ({"choice": ["a", ""]}, "choice must be a list of texts, none of them empty"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"choice has {MAX_CHOICES + 1} texts"),
        ({"choice": ["a" * MAX_BYTES]}, f"more than {MAX_BYTES} bytes"),
        ({"regex": "a" * MAX_BYTES}, f"more than {MAX_BYTES} bytes"),
        ({"json": {"const": "a" * MAX_BYTES}}, f"more than {MAX_BYTES} bytes"),
        ({"regex": "a", "disable_any_whitespace": 2}, "disable_any_whitespace must be true or false"),
        ("[1]", "an object or its JSON text is needed"),
        ("no JSON", "is not JSON"),
        (5, "an object or its JSON text is needed"),
    ],
)
def test_a_wrong_form_is_refused_by_name(given, text):
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as refusal:
        sampling(given)
    assert refusal.value.param == "structured_outputs"


def chat(**fields):
    messages = [{"role": "user", "content": "hello"}]
    request = parse(ChatCompletionRequest, json.dumps({"model": "m", "messages": messages, **fields}).encode())
    assert request.ignored_fields() == []
    request.trim()
    return request.sampling().get("structured_outputs")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "f", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}, {"json_object": True}),
    ],
)
def test_openais_fields_state_a_form(fields, form):
    assert json.loads(chat(**fields)) == form


def test_a_response_format_of_text_is_no_form():
    assert chat(response_format={"type": "text"}) is None
    assert json.loads(chat(response_format={"type": "text"}, guided_regex="a")) == {"regex": "a"}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex",
            "guided_choice and guided_regex: only one form",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "response_format and structured_outputs: only one form",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", KINDS),
        ({"structured_outputs": {}}, "structured_outputs", KINDS),
        ({"guided_choice": []}, "guided_choice", "choice must be a list of texts that is not empty"),
        ({"guided_json": "x" * (MAX_BYTES + 1)}, "guided_json", f"more than {MAX_BYTES} bytes"),
        ({"response_format": "json"}, "response_format", "an object with a type is needed"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema needs a name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "strict": "yes"}}},
            "response_format",
            "strict must be true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": [1]}}},
            "response_format",
            "json must be a JSON schema",
        ),
    ],
)
def test_a_wrong_field_of_openais_is_refused_by_name(fields, param, text):
    with pytest.raises(InvalidRequestError, match=re.escape(text), check=lambda error: error.param == param):
        chat(**fields)


def test_a_form_is_read_once_in_a_process_and_not_by_the_engine(monkeypatch):
    read = sampling({"json": SCHEMA})
    monkeypatch.setattr("headrace.structured_outputs._object", None)  # Whoever reads again fails.
    assert read.changed({"seed": 1}).resolved(8).structured_outputs is read.structured_outputs
    complete = Submission(sampling=read.model_dump_json().encode())
    assert sampling_of(complete) == read


async def test_a_body_with_many_objects_is_parsed_in_a_process():
    schema = {"anyOf": [{"const": number} for number in range(200)]}
    form = json.dumps({"model": "m", "prompt": "a", "structured_outputs": {"json": schema}}).encode()
    bodies = Mock(run=AsyncMock(return_value=("parsed", b"")))
    front = FrontEnd(Mock(), Mock(), bodies, Mock())
    assert await front.parsed(CompletionRequest, form, Mock()) == "parsed"
    assert (await front.parsed(CompletionRequest, b'{"model": "m", "prompt": "a"}', Mock())).prompt == ["a"]
