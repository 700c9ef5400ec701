"""Requests for responses, parsed and checked, and responses on record."""

import json
from types import SimpleNamespace

import orjson
import pytest

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_protos.headrace_pb2 import PayloadRecord
from headrace_transformer.frontends.openai.requests import parse, parse_large
from headrace_transformer.frontends.responses import stored
from headrace_transformer.frontends.responses.answers import ResponseAnswer
from headrace_transformer.frontends.responses.requests import ResponsesRequest
from headrace_transformer.frontends.responses.stored import StoredResponses, conversation_of, new_response_id, tools_of
from headrace_transformer.generation.chunks import Assembler, Origin
from headrace_transformer.generation.resume_ids import Signer
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.text.answer_parser import AnswerSyntax
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Reasoning

SIGNER = Signer(b"a key")
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}

DEEP = json.loads('{"x": ' * 300 + "0" + "}" * 300)  # Deeper than JSON is written.


def request(**fields):
    return parse(ResponsesRequest, json.dumps({"input": "Hello."} | fields).encode())


def test_input_is_a_text_or_messages_with_text():
    assert request(instructions="Be brief.").continuing([("user", "a"), ("assistant", "b")]) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Hello."),
    ]
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    answer = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    items = [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": parts}, answer]
    assert request(input=items).continuing([]) == [("system", "d"), ("user", "one\ntwo"), ("assistant", "x")]


def test_reasoning_and_calls_are_one_message_of_the_assistant():
    call = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]}
    items = [
        {"role": "user", "content": "u"},
        reasoning,
        said,
        call,
        call,
        output,
        call,
        said,
        reasoning | {"content": None},
    ]
    body = {"input": items, "tools": [FUNCTION]}
    function = {"name": "f", "arguments": '{"x": 1}'}
    called = {"id": "1", "type": "function", "function": function}
    for parsed in (request(**body), parse_large(orjson.dumps(body), ResponsesRequest)[0]):
        messages = [(*message[:2], *map(json.loads, message[2:])) for message in parsed.continuing([])]
        assert messages == [
            ("user", "u"),
            ("assistant", "a", {"tool_calls": [called, called], "reasoning_content": "r"}),
            ("tool", "o", {"tool_call_id": "1"}),
            ("assistant", "", {"tool_calls": [called]}),
            ("assistant", "a"),
        ]
        nested = {"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}
        assert json.loads(parsed.tool_use.definitions) == [nested]
    assert request(tools=[FUNCTION], tool_choice="none").tool_use is None
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    use = request(tools=[FUNCTION, FUNCTION | {"name": "g"}], tool_choice=allowed, parallel_tool_calls=False).tool_use
    assert (use.names, use.is_required, use.is_parallel) == ({"f"}, True, False)


def test_sampling_fields_are_read_and_others_named():
    fields = {"temperature": 0.5, "logit_bias": {"5": 1}, "max_output_tokens": 7, "user": "me", "max_tokens": 3}
    large, _ = parse_large(orjson.dumps({"input": "Hello."} | fields), ResponsesRequest)
    for parsed in (request(**fields), large):
        assert parsed.sampling() == {"temperature": 0.5, "logit_bias": {"5": 1}, "max_tokens": 7}
        assert parsed.ignored_fields() == ["user", "max_tokens"]
    nothing = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    assert request(**nothing).ignored_fields() == []
    nulls = {"text": {"format": None, "verbosity": None, "x": None}, "reasoning": {"effort": None, "summary": None}}
    assert request(**nulls).ignored_fields() == []
    thought = request(chat_template_kwargs={"enable_thinking": False}, reasoning={"effort": "low"})
    assert thought.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert thought.ignored_fields() == []


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": None}, "input", "Field required"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, None, "at most 4096"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input.0.type", "'message'"),
        ({"input": [{"role": "user"}]}, "input.0", "message needs content"),
        ({"input": [{"role": None, "content": "x"}]}, "input.0", "message needs role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0", "function_call_output needs call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content", "'input_file' are not"),
        ({"background": True}, "background", "is not supported"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "is not supported"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "json_schema needs a name"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "'none', 'minimal'"),
        ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        ({"tools": [{"type": "function"}]}, "tools", "tool 0: a name must have"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tool 0: a name must have"),
        ({"tools": [{"type": "mcp", "server_label": "m"}]}, "tools", "is of type 'mcp'; only functions"),
        ({"tools": [{"type": "file_search"}]}, "tools", "is of type 'file_search'; only functions"),
        ({"tools": [FUNCTION | {"parameters": DEEP}]}, "tools", "cannot be written as JSON"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "names 'g'"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice", "must be none, auto"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, param, text):
    with pytest.raises(InvalidRequestError, match=text, check=lambda error: error.param == param):
        request(**fields)


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
    call = CallContext("", "r/ü", (("x-headrace-client", "alice"),))
    own, other = new_response_id(call, SIGNER), new_response_id(call, SIGNER)
    log = Log([], [record({"response_id": other}), record({}), record({"response_id": own})])
    found = await StoredResponses(log, SIGNER).find(own, call, "previous_response_id")
    assert json.loads(found.parameters) == {"response_id": own}
    assert [(query.request_id, query.client) for query in log.queries] == [("r/ü", "alice")] * 2


_OF_ANOTHER_CLIENT = new_response_id(CallContext("", "r", (("x-headrace-client", "bob"),)), SIGNER)


@pytest.mark.parametrize(
    "wrong",
    ["", "resp_", "resp_1", "x" * 80, "resp_" + "0" * 32 + "!", "resp_" + "0" * 32 + "cg", _OF_ANOTHER_CLIENT],
    ids=["empty", "prefix", "short", "no prefix", "no base64", "invented", "of another client"],
)
async def test_an_id_that_its_client_cannot_have_costs_no_look_at_the_log(wrong):
    log = Log([record({"response_id": wrong})])
    with pytest.raises(InvalidRequestError, match="there is no response") as raised:
        await StoredResponses(log, SIGNER).find(wrong, CallContext("", "r"), "previous_response_id")
    assert raised.value.param == "previous_response_id"
    assert not log.queries


def test_a_conversation_goes_on_without_its_instructions():
    text = [Content("a")]
    assert conversation_of(record({"instructions": True}), text) == [("user", "u"), ("assistant", "a")]
    assert conversation_of(record({}), text) == [("system", "s"), ("user", "u"), ("assistant", "a")]
    for prompt in ("[REDACTED]", [], [5], {"role": "x"}):
        with pytest.raises(InvalidRequestError, match="not on record"):
            conversation_of(record({}, prompt), text)


def test_a_conversation_goes_on_with_its_calls():
    result = {"role": "tool", "content": "o", "tool_call_id": "0"}
    parts = [Reasoning("r"), Content("a"), CallStart(0, "1", "f"), CallArguments(0, '{"x"'), CallArguments(0, ": 1}")]
    *_, before, answer = conversation_of(record({}, [result]), parts)
    assert (before[:2], json.loads(before[2])) == (("tool", "o"), {"tool_call_id": "0"})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert (answer[:2], json.loads(answer[2])) == (("assistant", "a"), {"tool_calls": [call], "reasoning_content": "r"})
    *_, cut = conversation_of(record({}), parts[:-1])
    assert json.loads(cut[2])["tool_calls"][0]["function"]["arguments"] == '{"x"'
    assert tools_of(record({"tools": "[REDACTED]"})) is None
    tools = tools_of(record({"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False}))
    assert (tools.names, tools.is_parallel) == ({"f"}, False)


CUSTOM = {"type": "custom", "name": "patch", "description": "Edits."}
SPACE = {"type": "namespace", "name": "mcp", "description": "Tools.", "tools": [FUNCTION]}


def test_what_agents_send_is_read_or_named():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    asked = request(
        include=["reasoning.encrypted_content", "web_search_call.results"],
        max_tool_calls=3,
        prompt_cache_key="k",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        tools=[{"type": "web_search"}, {"type": "local_shell"}, CUSTOM | {"format": grammar}, SPACE],
        truncation="auto",
    )
    assert asked.template_options == {"enable_thinking": True, "reasoning_effort": "low"}
    asked.name_unread_hints(lambda variable: variable == "reasoning_effort")
    assert sorted(asked.ignored_fields()) == [
        "include",
        "max_tool_calls",
        "prompt_cache_key",
        "reasoning.summary",
        "text.verbosity",
        "tools.format",
        "tools.local_shell",
        "tools.web_search",
    ]
    patch, function = (json.loads(tool.definition)["function"] for tool in asked.tools)
    assert (patch["name"], patch["parameters"]["required"]) == ("patch", ["input"])
    assert patch["description"].endswith("lark grammar:\nstart: x")
    assert (function["name"], function["description"]) == ("mcp__f", "d")
    assert request(reasoning={"effort": "none"}).template_options == {"enable_thinking": False}


def test_calls_of_custom_tools_and_of_namespaces_are_functions_calls():
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "a\nb"}
    spaced = {"type": "function_call", "call_id": "2", "name": "f", "namespace": "mcp", "arguments": "{}"}
    results = [{"type": "custom_tool_call_output", "call_id": "1", "output": "done"}]
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "mr1.SG0u"}
    _, answer, result = request(
        input=[{"role": "user", "content": "u"}, reasoning, custom, spaced, *results]
    ).conversation
    fields = json.loads(answer[2])
    called = [call["function"] for call in fields["tool_calls"]]
    assert [call["name"] for call in called] == ["patch", "mcp__f"]
    assert json.loads(called[0]["arguments"]) == {"input": "a\nb"}
    assert fields["reasoning_content"] == "Hm."
    assert result[:2] == ("tool", "done")


def test_another_servers_reasoning_is_left_out():
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    said = {"type": "message", "role": "assistant", "content": "a"}
    assert request(input=[{"role": "user", "content": "u"}, foreign, said]).conversation[1] == ("assistant", "a")


class Texts:
    """A detokenizer of tokens that are their texts' places in a list."""

    stopped, stop_string = False, None

    def __init__(self, texts):
        self.push = texts.__getitem__

    def flush(self):
        return ""


async def scored_output(texts, per_chunk, syntax, stream):
    asked = request(tools=[FUNCTION], include=["message.output_text.logprobs"], stream=stream)
    token_bytes = SimpleNamespace(of=lambda token_id: texts[token_id].encode())
    origin = Origin(SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=token_bytes)), [])
    parser = syntax.parser("", asked.tool_use, 1)
    assembler = Assembler(Texts(texts), origin, parser=parser, end_ids=[len(texts) - 1])

    async def chunks():
        for at in range(0, len(texts), per_chunk):
            ids = list(range(at, min(at + per_chunk, len(texts))))
            reason = "stop" if ids[-1] == len(texts) - 1 else None
            yield assembler.take(TokenChunk(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=reason), 0.0)

    answer = ResponseAnswer("resp_1", 0, asked)
    written = [body.data async for body in (answer.events if stream else answer.whole)(chunks())]
    if not stream:
        return json.loads(written[0])["output"]
    events = [json.loads(line[6:]) for line in b"".join(written).splitlines() if line.startswith(b"data: ")]
    return events[-1]["response"]["output"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_chunk", [1, 2, 3, 4, 5, 7, 100])
async def test_a_texts_log_probabilities_are_of_its_own_tokens_in_chunks_of_any_size(per_chunk, stream):
    call = [*'{"name": "f", "arguments": ', "{}", "}"]
    texts = [
        "<think>",
        "a",
        " t",
        "</think>",
        "\n\n",
        "t",
        "\n",
        " u",
        "<tool_call>",
        *call,
        "</tool_call>",
        " v",
        "</s>",
    ]
    output = await scored_output(texts, per_chunk, AnswerSyntax("hermes", "think", takes_tools=True), stream)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    tokens = [[one["token"] for one in item["content"][0]["logprobs"]] for item in (output[1], output[3])]
    assert tokens == [["t", "\n", " u"], [" v", "</s>"]]
    plain = await scored_output(["t", "s", "", "</s>"], per_chunk, AnswerSyntax(), stream)
    assert [one["token"] for one in plain[0]["content"][0]["logprobs"]] == ["t", "s", "", "</s>"]
