"""Requests for responses, parsed and checked, and responses on record."""

import json

import orjson
import pytest

from millrace.errors import InvalidRequestError
from millrace.rpc.call_context import CallContext
from millrace_protos.millrace_pb2 import PayloadRecord
from services.transformer.frontends.openai.requests import parse, parse_large
from services.transformer.frontends.responses import stored
from services.transformer.frontends.responses.requests import ResponsesRequest
from services.transformer.frontends.responses.stored import StoredResponses, conversation_of, new_response_id


def request(**fields):
    return parse(ResponsesRequest, orjson.dumps({"input": "Hello."} | fields))


def test_input_is_a_text_or_messages_with_text():
    assert request(instructions="Be brief.").conversation([("user", "a"), ("assistant", "b")]) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Hello."),
    ]
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    answer = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    items = [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": parts}, answer]
    assert request(input=items).conversation([]) == [("system", "d"), ("user", "one\ntwo"), ("assistant", "x")]


def test_sampling_fields_are_read_and_others_named():
    fields = {"temperature": 0.5, "logit_bias": {"5": 1}, "max_output_tokens": 7, "user": "me", "max_tokens": 3}
    large, _ = parse_large(orjson.dumps({"input": "Hello."} | fields), ResponsesRequest)
    for parsed in (request(**fields), large):
        assert parsed.sampling() == {"temperature": 0.5, "logit_bias": {"5": 1}, "max_tokens": 7}
        assert parsed.ignored_fields() == ["user", "max_tokens"]
    nothing = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    assert request(**nothing).ignored_fields() == []


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": None}, "input", "Field required"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, None, "at most 4096"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input.0.type", "'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content", "'input_file' are not"),
        ({"background": True}, "background", "is not supported"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "is not supported"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "json_schema needs a name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "is not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, param, text):
    with pytest.raises(InvalidRequestError, match=text) as raised:
        request(**fields)
    assert raised.value.param == param


class Log:
    """Answers each query with the next of its lists of records, and then with the last one."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.queries = []

    async def Query(self, query, timeout):  # noqa: N802
        self.queries.append(query)
        for record in self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]:
            yield record


def record(parameters, prompt=None):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}] if prompt is None else prompt
    return PayloadRecord(text="a", prompt=json.dumps(messages), parameters=json.dumps(parameters))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(stored, "_PAUSES_S", (0.001, 0.001))


async def test_a_response_is_found_by_its_request_and_its_random_part():
    own, other = new_response_id("r/ü"), new_response_id("r/ü")
    log = Log([], [record({"response_id": other}), record({}), record({"response_id": own})])
    call = CallContext("", "r", (("x-millrace-client", "alice"),))
    found = await StoredResponses(log).find(own, call, "previous_response_id")
    assert json.loads(found.parameters) == {"response_id": own}
    assert [(query.request_id, query.client) for query in log.queries] == [("r/ü", "alice")] * 2


@pytest.mark.parametrize(
    "wrong", ["", "resp_", "resp_1", "x" * 80, "resp_" + "0" * 32 + "!", "resp_" + "0" * 32 + "cg"]
)
async def test_an_unknown_response_is_refused(wrong):
    log = Log([record({"response_id": new_response_id("r")})])
    with pytest.raises(InvalidRequestError, match="there is no response") as raised:
        await StoredResponses(log).find(wrong, CallContext("", "r"), "previous_response_id")
    assert raised.value.param == "previous_response_id"
    assert len(log.queries) <= 3


def test_a_conversation_goes_on_without_its_instructions():
    assert conversation_of(record({"instructions": True})) == [("user", "u"), ("assistant", "a")]
    assert conversation_of(record({})) == [("system", "s"), ("user", "u"), ("assistant", "a")]
    for prompt in ("[REDACTED]", [], [5], {"role": "x"}):
        with pytest.raises(InvalidRequestError, match="not on record"):
            conversation_of(record({}, prompt))
