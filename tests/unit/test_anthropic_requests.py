"""What Anthropic's clients send, parsed and checked, and the shape of errors."""

import json
from contextvars import copy_context

import orjson
import pytest

from headrace.errors import InvalidRequestError, NotReadyError, OverloadedError
from headrace.telemetry.identity import begin_request
from headrace_transformer.frontends.anthropic.answers import anthropic_error, whole
from headrace_transformer.frontends.anthropic.requests import ConversationRequest, MessagesRequest
from headrace_transformer.frontends.openai.requests import parse, parse_large
from headrace_transformer.text.answer_parts import CallArguments, CallStart
from tests.support.text_chunks import text_chunk

USER = {"role": "user", "content": "Hello."}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
DEEP = json.loads('{"x": ' * 300 + "0" + "}" * 300)  # Deeper than JSON is written.
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
DATA = {"type": "text", "media_type": "text/plain", "data": "It rains."}


def document(source, **fields):
    return {"role": "user", "content": [{"type": "document", "source": source, **fields}]}


def messages(*turns, **fields):
    return parse_one(MessagesRequest, {"messages": turns or [USER], "max_tokens": 5, **fields})


def parse_one(cls, body):
    return parse(cls, json.dumps(body).encode())


def test_a_system_prompt_goes_before_the_turns():
    block = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    request = messages(USER, {"role": "assistant", "content": [block, block]}, USER, system=[block])
    assert request.conversation == [
        ("system", "one"),
        ("user", "Hello."),
        ("assistant", "one\none"),
        ("user", "Hello."),
    ]
    assert parse_one(ConversationRequest, {"messages": [USER]}).conversation == [("user", "Hello.")]


def test_blocks_of_tools_are_messages_of_a_chat():
    text, thinking = {"type": "text", "text": "t"}, {"type": "thinking", "thinking": "r", "signature": ""}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [text, text]},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        text,
        text,
    ]
    turns = [USER, {"role": "assistant", "content": [thinking, text, CALL]}, {"role": "user", "content": results}]
    whole = {"messages": turns, "max_tokens": 5, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}
    for request in (messages(*turns, tools=[TOOL]), parse_large(orjson.dumps(whole), MessagesRequest)[0]):
        called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
        assert [(*message[:2], *map(orjson.loads, message[2:])) for message in request.conversation] == [
            ("user", "Hello."),
            ("assistant", "t", {"tool_calls": [called], "reasoning_content": "r"}),
            ("tool", "t\nt", {"tool_call_id": "1"}),
            ("tool", "", {"tool_call_id": "2"}),
            ("user", "t\nt"),
        ]
        function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        assert orjson.loads(request.tool_use.definitions) == [{"type": "function", "function": function}]
    single = messages(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}).tool_use
    assert (single.is_required, single.is_parallel) == (True, False)
    assert messages(tools=[TOOL], tool_choice={"type": "none"}).tool_use is None


def test_turns_of_one_role_are_one():
    thinking = {"type": "thinking", "thinking": "r", "signature": ""}
    results = [{"type": "tool_result", "tool_use_id": "1", "content": one} for one in "ab"]
    answers = [{"role": "assistant", "content": one} for one in ("x", [thinking, CALL], [thinking, CALL | {"id": "2"}])]
    asked = [{"role": "user", "content": one} for one in ([results[0]], [results[1], {"type": "text", "text": "c"}])]
    conversation = messages(USER, USER, *answers, *asked, USER, {"role": "system", "content": "s"}, USER).conversation
    assert [message[:2] for message in conversation] == [
        ("user", "Hello.\nHello."),
        ("assistant", "x"),
        ("tool", "a"),
        ("tool", "b"),
        ("user", "c\nHello."),
        ("system", "s"),
        ("user", "Hello."),
    ]
    fields = orjson.loads(conversation[1][2])
    assert fields["reasoning_content"] == "r\nr"
    assert [(call["id"], call["function"]["arguments"]) for call in fields["tool_calls"]] == [
        ("1", '{"x":1}'),
        ("2", '{"x":1}'),
    ]


async def test_the_input_of_a_call_is_what_of_its_arguments_is_json():
    cases = {
        '{"x": [1, 2], "y": "z': {"x": [1, 2]},
        "{'x': 1}": {},
        '{"x": 1}': {"x": 1},
        '{"x": 123456789012345678901}': {"x": 123456789012345678901},  # More than 64 bits.
        '{"x": NaN}': {"x": None},
    }
    for arguments, expected in cases.items():

        async def chunks(arguments=arguments):
            parts = [CallStart(0, "1", "f"), CallArguments(0, arguments)]
            yield text_chunk("", (), "stop", parts=parts)

        (body,) = [body async for body in whole("1", "m", chunks())]
        (block,) = json.loads(body.data)["content"]
        assert block == {"type": "tool_use", "id": "1", "name": "f", "input": expected, "caller": {"type": "direct"}}


def test_sampling_fields_are_read_and_others_named():
    fields = {"temperature": 0.5, "top_k": 7, "seed": 3, "logit_bias": {"5": 1}, "metadata": {"user_id": "me"}}
    whole = {"messages": [USER], "max_tokens": 9, "stop_sequences": ["a"], **fields}
    for request in (parse_one(MessagesRequest, whole), parse_large(orjson.dumps(whole), MessagesRequest)[0]):
        expected = {"max_tokens": 9, "temperature": 0.5, "top_k": 7, "seed": 3, "logit_bias": {"5": 1}}
        assert request.sampling() == expected
        assert request.stop == ("a",)
        assert request.ignored_fields() == ["metadata"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_tokens": None}, "max_tokens", "Field required"),
        ({"tools": [{"name": "f"}]}, "tools", "tool 0: input_schema must be"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "tool 0 is of type 'bash_20250124'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "names 'g'"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice", "must be of type auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice", "true or"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.1.content",
            "tool_use_id",
        ),
        ({"messages": [{"role": "assistant", "content": [CALL | {"input": DEEP}]}]}, "messages.0.content", "as JSON"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content", "'tool_use' are not"),
        ({"thinking": {"type": "always"}}, "thinking.type", "'enabled', 'adaptive' or 'disabled'"),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers", "is not supported"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format", "'regex'"),
        ({"system": 5}, "system", "a string or a list of blocks"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages", "can be continued"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages", "can be continued"),
        ({"messages": [document({"type": "base64", "data": "eA=="})]}, "messages.0.content", "source of type 'base64'"),
        ({"messages": [document({"type": "url", "url": "http://x"})]}, "messages.0.content", "source of type 'url'"),
        ({"messages": [document(DATA, citations={"enabled": True})]}, "messages.0.content", "citations of a document"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content", "'image' are not"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content", "an object with a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "must have a text"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, param, text):
    with pytest.raises(InvalidRequestError, match=text, check=lambda error: error.param == param):
        parse_one(MessagesRequest, {"messages": [USER], "max_tokens": 5} | fields)


def test_values_that_ask_for_nothing_are_accepted():
    assert messages(tools=[], tool_choice={"type": "none"}, thinking={"type": "disabled"}).ignored_fields() == []
    nulls = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": None}}
    request = messages(USER | {"name": None}, output_config={"format": None, "effort": None}, **nulls)
    assert request.tool_use.is_parallel
    assert request.ignored_fields() == ["tools.cache_control"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("bad"), "invalid_request_error"),
        (OverloadedError("later"), "rate_limit_error"),
        (NotReadyError("loading", hop="predictor"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error, kind):
    call = copy_context()  # Later tests have no request's id.
    call.run(begin_request, "r-1")
    described = {"type": kind, "message": error.message}
    assert call.run(anthropic_error, error) == {"type": "error", "error": described, "request_id": "r-1"}


def test_what_agents_send_is_read_or_named():
    cached = {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, cached, CALL]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [cached], "is_error": False}
    turns = [USER, {"role": "system", "content": [cached]}, answer, {"role": "user", "content": [result]}]
    body = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
        "tools": [TOOL],
    }
    request = messages(*turns, **body)
    assert [message[:2] for message in request.conversation] == [
        ("user", "Hello."),
        ("system", "t"),
        ("assistant", "t"),
        ("tool", "t"),
    ]
    request.name_unread_hints(lambda variable: variable == "enable_thinking")
    assert sorted(request.ignored_fields()) == [
        "content.cache_control",
        "content.redacted_thinking",
        "context_management",
        "metadata",
        "output_config.effort",
        "thinking.budget_tokens",
        "tools.cache_control",
    ]
    request.name_unread_hints(lambda variable: False)
    assert "thinking" in request.ignored_fields()


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [("enabled", {"enable_thinking": True}), ("disabled", {"enable_thinking": False}), ("adaptive", {})],
)
def test_thinking_is_a_variable_of_the_template(thinking, variables):
    assert messages(thinking={"type": thinking}).template_options == variables
    own = {"enable_thinking": None, "x": {"y": None}}
    request = messages(thinking={"type": thinking}, chat_template_kwargs=own)
    assert (request.template_options, request.ignored_fields()) == (own, [])


def test_documents_are_texts():
    parts = {"type": "content", "content": [{"type": "text", "text": "It is"}, {"type": "text", "text": "warm."}]}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "Rome."}]}
    turns = [document(DATA, title="Rome", context="Today."), document(parts), {"role": "user", "content": [found]}]
    assert messages(*turns).conversation == [("user", "Rome\nToday.\nIt rains.\nIt is\nwarm.\nt\ns\nRome.")]


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_form_of_the_answer_is_read_in_both_its_places(place):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = messages(**{place: form if place == "output_format" else {"format": form}})
    assert json.loads(request.sampling()["structured_outputs"]) == {"json": {"type": "object"}}
    assert request.ignored_fields() == []


def test_a_last_message_of_the_assistant_is_continued():
    request = messages(USER, {"role": "assistant", "content": "Once"})
    assert request.template_options == {"continue_final_message": True, "add_generation_prompt": False}
