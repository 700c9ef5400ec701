"""What Anthropic's clients send, parsed and checked, and the shape of errors."""

import orjson
import pytest

from millrace.errors import InvalidRequestError, NotReadyError, OverloadedError
from services.transformer.frontends.anthropic.errors import anthropic_error
from services.transformer.frontends.anthropic.requests import ConversationRequest, MessagesRequest
from services.transformer.frontends.openai.requests import parse, parse_large

USER = {"role": "user", "content": "Hello."}


def messages(*turns, **fields):
    return parse_one(MessagesRequest, {"messages": turns or [USER], "max_tokens": 5, **fields})


def parse_one(cls, body):
    return parse(cls, orjson.dumps(body))


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


def test_sampling_fields_are_read_and_others_named():
    fields = {"temperature": 0.5, "top_k": 7, "seed": 3, "logit_bias": {"5": 1}, "metadata": {"user_id": "me"}}
    whole = {"messages": [USER], "max_tokens": 9, "stop_sequences": ["a"], **fields}
    for request in (parse_one(MessagesRequest, whole), parse_large(orjson.dumps(whole), MessagesRequest)[0]):
        expected = {"max_tokens": 9, "temperature": 0.5, "top_k": 7, "seed": 3, "logit_bias": {"5": 1}}
        assert request.sampling() == expected
        assert request.stop_sequences == ("a",)
        assert request.ignored_fields() == ["metadata"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_tokens": None}, "max_tokens", "Field required"),
        ({"tools": [{"name": "f"}]}, "tools", "is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", "is not supported"),
        ({"system": 5}, "system", "valid string"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages", "the last message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content", "'image' are not"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content", "an object with a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "must have a text"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, param, text):
    with pytest.raises(InvalidRequestError, match=text) as raised:
        parse_one(MessagesRequest, {"messages": [USER], "max_tokens": 5} | fields)
    assert raised.value.param == param


def test_values_that_ask_for_nothing_are_accepted():
    assert messages(tools=[], tool_choice={"type": "none"}, thinking={"type": "disabled"}).ignored_fields() == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("bad"), "invalid_request_error"),
        (OverloadedError("later"), "rate_limit_error"),
        (NotReadyError("loading", hop="predictor"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error, kind):
    assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": error.message}}
