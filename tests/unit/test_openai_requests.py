"""Requests of OpenAI's clients: supported fields are read, unsupported ones refused by name."""

import json
import pickle

import orjson
import pytest

from headrace.errors import ContextLengthError, InvalidRequestError, NotFoundError, OverloadedError, RequestFailedError
from headrace_transformer.frontends.openai.errors import UnsupportedFieldError, openai_error
from headrace_transformer.frontends.openai.generation_requests import ChatCompletionRequest, CompletionRequest
from headrace_transformer.frontends.openai.requests import parse, parse_large
from headrace_transformer.frontends.openai.text_requests import EmbeddingsRequest, TokenizeRequest
from headrace_transformer.generation.token_quota import MonthUsedError
from headrace_transformer.text.tools import ToolUse


def completion(**fields):
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(*messages, **fields):
    messages = messages or ({"role": "user", "content": "hello"},)
    return parse(ChatCompletionRequest, json.dumps({"model": "m", "messages": messages, **fields}).encode())


def embeddings(**fields):
    return parse(EmbeddingsRequest, json.dumps({"model": "m", "input": "text", **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("once", ["once"]),
        (["once", "twice"], ["once", "twice"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0, 2**31 - 1], [[0, 2**31 - 1]]),
    ],
)
def test_a_prompt_is_a_text_texts_ids_or_lists_of_them(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts
    assert embeddings(input=prompt).input == prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: Field required"),
        ([], "prompt: is empty"),
        (5, "must be a string"),
        (["once", 1], "must be a string"),
        ([1, "once"], "token ids must be whole numbers"),
        ([1, 2.0], "token ids must be whole numbers"),
        ([1, True], "token ids must be whole numbers"),
        ([[1], "once"], "must be a string"),
        ([1, -1], "from 0 to 2147483647"),
        ([1, 2**31], "from 0 to 2147483647"),
        (["p"] * 65, "has 65 items, at most 64 are allowed"),
        ([1] * (1024 * 1024 + 1), "more than any context"),
    ],
)
def test_a_prompt_of_anything_else_is_refused(prompt, message):
    with pytest.raises(InvalidRequestError, match=message, check=lambda error: error.param == "prompt"):
        completion(prompt=prompt)


def test_null_counts_as_absent_and_unknown_fields_are_ignored():
    nothing = ("n", "stop", "stream", "stream_options", "logprobs", "best_of", "suffix", "max_tokens", "logit_bias")
    request = completion(**dict.fromkeys(nothing), user="me", unknown_field={"this": 1})
    assert (request.n, request.stop, request.stream, request.include_usage) == (1, (), False, False)
    assert request.sampling() == {}
    assert not completion(stream_options={"include_usage": None, "x": None}, stream=True).include_usage
    calls = [{"id": "1", "type": None, "function": {"name": "f", "arguments": None}}]
    said = {"role": "assistant", "content": None, "name": None, "tool_calls": calls, "x": None}
    schema = {"type": "object", "default": None}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    whole = chat(said, tools=tools, chat_template_kwargs={"x": None}, logit_bias={})
    assert json.loads(json.loads(whole.conversation[0][2])["tool_calls"][0]["function"]["arguments"] or "{}") == {}
    assert whole.template_options == {"x": None}
    assert json.loads(whole.tools[0].parameters) == schema
    allowed = {"mode": "required", "tools": [{"type": None, "function": {"name": "f", "x": None}}]}
    assert chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).tool_use.is_required


def test_fields_without_effect_are_named():
    assert completion(n=1, top_k=5, logit_bias={}, max_tokens=2, user=None).ignored_fields() == []
    assert completion(stream_interval=1, include_reasoning=True).ignored_fields() == [
        "stream_interval",
        "include_reasoning",
    ]
    assert completion(priority=-1).sampling() == {"priority": -1}
    assert completion(stream=True, stream_options={"include_usage": True, "x": 1}).ignored_fields() == [
        "stream_options.x"
    ]
    assert completion(max_completion_tokens=5).ignored_fields() == ["max_completion_tokens"]
    assert chat(max_completion_tokens=5).ignored_fields() == []
    assert embeddings(user="me").ignored_fields() == ["user"]


def test_names_of_fields_are_fit_for_a_header():
    named = completion(**{"a\r\nb: c": 1, "é" * 1000: 1}, **{f"x{i}": 1 for i in range(1000)}).ignored_fields()
    assert named[:3] == ["a??b??c", "?" * 64, "x0"]
    assert len(named) == 16


def test_tools_that_may_not_be_called_are_not_refused():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, tool_choice="none").ignored_fields() == []
    assert chat(functions=[{"name": "f"}], function_call="none").tool_use is None


def test_functions_are_an_older_way_of_tools():
    functions = [tool["function"] for tool in TOOLS]
    use = chat(functions=functions).tool_use
    assert use == chat(tools=TOOLS, parallel_tool_calls=False).tool_use
    assert chat(functions=functions, function_call="auto").tool_use == use
    forced = chat(functions=functions, function_call={"name": "g"})
    assert forced.tool_use == ToolUse(use.functions[1:], is_required=True, is_parallel=False)
    assert forced.ignored_fields() == []
    body = {"messages": [{"role": "user", "content": "x"}], "functions": functions}
    assert pickled(parse_large(json.dumps(body).encode(), ChatCompletionRequest)[0]).tool_use == use


def test_the_older_messages_of_functions_are_as_templates_take_those_of_tools():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    asked, answer = chat(call, {"role": "function", "name": "f", "content": "4"}).conversation
    (role, content, fields), result = asked, answer
    (tool_call,) = json.loads(fields)["tool_calls"]
    assert (role, content, tool_call["function"]) == ("assistant", "", call["function_call"])
    assert result[:2] == ("tool", "4")
    assert json.loads(result[2]) == {"name": "f", "tool_call_id": tool_call["id"]}
    assert len(tool_call["id"]) == 9
    with pytest.raises(InvalidRequestError, match="one of both"):
        chat(call | {"tool_calls": [CALL]})
    body = json.dumps({"messages": [call]}).encode()
    assert pickled(parse_large(body, ChatCompletionRequest)[0]).conversation == [asked]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_the_effort_of_reasoning_is_a_variable_of_the_template_or_named(effort):
    request = chat(reasoning_effort=effort)
    thinks = {"enable_thinking": effort != "none"}
    assert request.template_options == thinks | ({} if effort == "none" else {"reasoning_effort": effort})
    request.name_unread_hints(lambda variable: variable == "enable_thinking")
    assert request.ignored_fields() == []
    request.name_unread_hints(lambda variable: False)
    assert request.ignored_fields() == ["reasoning_effort"]
    own = {"enable_thinking": True, "reasoning_effort": "low"}
    assert chat(reasoning_effort=effort, chat_template_kwargs=own).template_options == own


@pytest.mark.parametrize("cls", [ChatCompletionRequest, TokenizeRequest])
def test_the_last_message_may_be_continued(cls):
    def options(**fields):
        return parse(cls, orjson.dumps({"messages": [{"role": "assistant", "content": "Once"}], **fields}))

    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert options().template_options == {}
    assert options(add_generation_prompt=False).template_options == {"add_generation_prompt": False}
    assert options(continue_final_message=True).template_options == continued
    assert options(**continued).template_options == continued


def test_what_only_speeds_up_or_is_for_records_of_openai_is_ignored_and_named():
    given = {
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
    }
    assert sorted(chat(**given, modalities=["text"]).ignored_fields()) == sorted(given)


def test_tools_are_read_with_the_choice_among_them():
    use = chat(tools=TOOLS).tool_use
    assert (use.names, use.is_required, use.is_parallel) == ({"f", "g"}, False, True)
    assert json.loads(use.definitions) == TOOLS
    assert [json.loads(function.parameters) for function in use.functions] == [{"type": "object"}, SCHEMA]
    assert chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).tool_use == ToolUse(
        use.functions, is_required=True, is_parallel=False
    )
    assert chat(tools=TOOLS, tool_choice=named("g")).tool_use == ToolUse(use.functions[1:], is_required=True)
    allowed = {"mode": "auto", "tools": [named("f")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert chat(tools=TOOLS, tool_choice=choice).tool_use == ToolUse(use.functions[:1])
    assert chat(tools=TOOLS, tool_choice="none").tool_use is None
    assert chat(tools=[], tool_choice="auto", parallel_tool_calls=True).tool_use is None
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}).encode()
    assert pickled(parse_large(body, ChatCompletionRequest)[0]).tool_use == use


def test_messages_of_calls_are_as_templates_take_them():
    request = chat(
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL, called("")]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "1"},
        {"role": "user", "content": "x", "tool_calls": None, "tool_call_id": "1"},
        {"role": "user", "content": "y", "name": "Ann", "cache": True, "annotations": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": "No."},
    )
    (*first, fields), (*second, answer), third, named, refused = request.conversation
    assert (first, second, third) == (["assistant", ""], ["tool", "4"], ("user", "x"))
    assert json.loads(answer) == {"tool_call_id": "1"}
    assert named == ("user", "y", '{"name":"Ann"}')
    assert refused == ("assistant", "No.", '{"refusal":"No."}')
    assert request.ignored_fields() == ["messages.cache"]
    assert json.loads(fields) == {"tool_calls": [CALL, called("")], "reasoning_content": "Hm."}
    body = {"messages": [{"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL, called("")]}]}
    large = pickled(parse_large(json.dumps(body).encode(), ChatCompletionRequest)[0])
    assert (large.conversation, large.messages) == ([("assistant", "", fields)], [])


@pytest.mark.parametrize(
    "value", ['{"x": 1', '{"x": "a\nb"}', '{"x": 1,}', "[]", "", None, [1], {"x": 1}, 5, '{"x":' * 300]
)
def test_the_arguments_of_an_earlier_call_may_be_anything(value):
    (_, _, fields) = chat({"role": "assistant", "tool_calls": [called(value)]}).conversation[0]
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    assert json.loads(fields)["tool_calls"][0]["function"]["arguments"] == text


def test_usage_in_every_event_needs_include_usage():
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=options).continuous_usage
    assert not completion(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


def test_vllms_sampling_fields_are_sampling_parameters():
    given = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    given |= {"stop_token_ids": [7], "seed": 3, "temperature": 0.5, "max_tokens": 9}
    assert completion(**given).sampling() == given
    assert chat(**given).sampling() == given


def test_restrictions_of_tokens_survive_the_process_that_reads_large_bodies():
    given = {"logit_bias": {"5": -100, "6": 1.5}, "allowed_token_ids": [5, 7], "bad_token_ids": [[7, 8]]}
    request, _ = parse_large(orjson.dumps(given | {"prompt": "p", "bad_words": ["one", "two"]}), CompletionRequest)
    assert request.sampling() == given
    assert request.bad_words == ("one", "two")
    for wrong in ({"bad_words": [""]}, {"bad_words": ["x"] * 65}, {"logit_bias": {"x": 1}}):
        with pytest.raises(InvalidRequestError) as raised:
            parse_large(orjson.dumps({"prompt": "p"} | wrong), CompletionRequest)
        assert raised.value.param == next(iter(wrong))


def test_the_newer_name_of_max_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=7).sampling() == {"max_tokens": 7}


def test_log_probabilities_are_requested_in_each_apis_way():
    assert completion(logprobs=3).sampling() == {"logprobs": True, "top_logprobs": 3}
    assert completion(logprobs=0).sampling() == {"logprobs": True, "top_logprobs": 0}
    assert chat(logprobs=True, top_logprobs=3).sampling() == {"logprobs": True, "top_logprobs": 3}
    assert chat(logprobs=False).sampling() == {}


UNSUPPORTED = {
    "suffix": (completion, {"suffix": "end"}),
    "best_of": (completion, {"best_of": 3, "n": 2}),
    "use_beam_search": (completion, {"use_beam_search": True}),
    "response_format": (chat, {"response_format": {"type": "structural_tag"}}),
    "audio": (chat, {"audio": {"voice": "alloy"}}),
    "modalities": (chat, {"modalities": ["text", "audio"]}),
    "chat_template": (chat, {"chat_template": "{{ messages }}"}),
    "truncation_side": (completion, {"truncation_side": "right"}),
    "prompt_embeds": (completion, {"prompt_embeds": "UEs="}),
    "spaces_between_special_tokens": (completion, {"spaces_between_special_tokens": False}),
}


@pytest.mark.parametrize("param", UNSUPPORTED)
def test_a_known_but_unsupported_field_is_refused_by_name(param):
    ask, fields = UNSUPPORTED[param]
    with pytest.raises(UnsupportedFieldError, match="is not supported") as raised:
        ask(**fields)
    error = openai_error(raised.value)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unsupported_parameter", param)


def test_an_unsupported_field_with_a_neutral_value_is_accepted():
    completion(suffix="", best_of=2, n=2, use_beam_search=False, response_format={"type": "text"})
    chat(tools=[], tool_choice="none", parallel_tool_calls=True, modalities=["text"], response_format={"type": "text"})


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "g", "description": "G.", "parameters": SCHEMA, "strict": True}},
]


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def named(name):
    return {"type": "function", "function": {"name": name}}


def called(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = called('{"x": 1}')
DEEP = json.loads("[" * 300 + "]" * 300)
WRONG = {
    "tools": [
        (chat, {"tools": tools})
        for tools in (
            {},
            [5],
            [{"type": "custom", "custom": {"name": "f"}}],
            [named("")],
            [named("f g")],
            [named("x" * 65)],
            [named("f"), named("f")],
            [{"type": "function", "function": {"name": "f", "description": 5}}],
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            [{"type": "function", "function": {"name": "f", "parameters": {"x": DEEP}}}],
            [{"type": "function", "function": {"name": "f", "description": "x" * 600_000}}],
            [named(f"f{i}") for i in range(129)],
        )
    ],
    "tool_choice": [
        (chat, {"tool_choice": choice, **tools})
        for choice, tools in (
            ("required", {}),
            (named("f"), {}),
            ("any", {"tools": TOOLS}),
            (named("h"), {"tools": TOOLS}),
            ({"type": "function"}, {"tools": TOOLS}),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, {"tools": TOOLS}),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [named("f")]}}, {"tools": TOOLS}),
        )
    ],
    "parallel_tool_calls": [(chat, {"parallel_tool_calls": 1})],
    "functions": [
        (chat, {"functions": functions, **tools})
        for functions, tools in (
            *(({}, {}), ([5], {}), ([{"name": "f"}], {"tools": TOOLS})),
            ([{"name": "f"}], {"tool_choice": "required"}),
        )
    ],
    "function_call": [
        (chat, {"function_call": call, **fields})
        for call, fields in (
            ("required", {"functions": [{"name": "f"}]}),
            ({"name": "h"}, {"functions": [{"name": "f"}]}),
            ({"name": "f"}, {}),
            ("auto", {"tools": TOOLS}),
        )
    ],
    "reasoning_effort": [(chat, {"reasoning_effort": effort}) for effort in ("most", 5)],
    "continue_final_message": [
        (chat, {"continue_final_message": True, **fields})
        for fields in (
            {"add_generation_prompt": True},
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        )
    ],
    "n": [(completion, {"n": 0}), (chat, {"n": 17}), (chat, {"n": True}), (completion, {"n": 2, "prompt": ["p"] * 33})],
    "best_of": [(completion, {"n": 2, "best_of": 1})],
    "stream": [(completion, {"stream": "yes"})],
    "stream_options": [(completion, {"stream_options": {"include_usage": True}})],
    "stop": [(completion, {"stop": 5})],
    "prompt_logprobs": [
        (chat, {"prompt_logprobs": 1, "stream": True}),
        (chat, {"prompt_logprobs": 21}),
        (completion, {"prompt_logprobs": 1, "logprobs": 2, "echo": True}),
    ],
    "logprobs": [(completion, {"logprobs": 21}), (completion, {"logprobs": True}), (chat, {"logprobs": 1})],
    "top_logprobs": [(chat, {"logprobs": True, "top_logprobs": 21})],
    "chat_template_kwargs": [(chat, {"chat_template_kwargs": [1]})],
    "encoding_format": [(embeddings, {"encoding_format": "hex"})],
}


@pytest.mark.parametrize("param", WRONG)
def test_a_wrong_value_is_refused_by_its_fields_name(param):
    for ask, fields in WRONG[param]:
        with pytest.raises(InvalidRequestError, check=lambda error: error.param == param):
            ask(**fields)


@pytest.mark.parametrize("cls", [ChatCompletionRequest, TokenizeRequest])
def test_variables_of_a_template_are_bounded_in_size_and_depth(cls):
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": %s}}'
    assert parse(cls, body % (b"[" * 200 + b"]" * 200)).chat_template_kwargs
    for value in (b"[" * 600 + b"]" * 600, b'"' + b"x" * 70_000 + b'"'):
        with pytest.raises(InvalidRequestError, check=lambda error: error.param == "chat_template_kwargs"):
            parse(cls, body % value)


def test_a_messages_content_is_text_or_parts_of_text():
    request = chat(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "x"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "4", "tool_call_id": "call-1"},
    )
    assert [message[:2] for message in request.conversation] == [
        ("system", "Be brief."),
        ("user", "one\ntwo"),
        ("assistant", ""),
        ("tool", "4"),
    ]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ({"content": "no role"}, "messages.0.role", "Field required"),
        ({"role": "user", "content": 5}, "messages.0.content", "valid string"),
        ({"role": "user", "content": ["text"]}, "messages.0.content", "an object with a type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content", "must have a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content", "'image_url' are not supported"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function", "Field required"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
            "messages.0.tool_calls.0.type",
            "'function'",
        ),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "messages.0.tool_calls", "at most 128"),
        ({"role": "user", "tool_calls": [CALL]}, "messages.0", "only the assistant's"),
        ({"role": "user", "function_call": {"name": "f"}}, "messages.0", "only the assistant's"),
        ({"role": "assistant", "function_call": {}}, "messages.0.function_call.name", "Field required"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages.0.audio", "not supported"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.0.content", "'input_audio' are not"),
        ({"role": "function", "content": "4"}, "messages.0", "needs its name"),
        ({"role": "tool", "content": "4"}, "messages.0", "needs tool_call_id"),
        ("hello", "messages.0", "valid dictionary"),
    ],
)
def test_any_other_message_is_refused(message, param, text):
    with pytest.raises(InvalidRequestError, match=text, check=lambda error: error.param == param):
        chat(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"prompt": "p", "model": 5}', "model: Input should be a valid string"),
        (b" " * (8 * 1024 * 1024 + 1), "more than any prompt"),
        (b'{"messages": [' + b"1," * 5000 + b"1]}", "5001 messages, at most 4096"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse(ChatCompletionRequest if b"messages" in body else CompletionRequest, body)


@pytest.mark.parametrize(
    ("error", "kind", "code", "param"),
    [
        (NotFoundError("no model 'x'"), "invalid_request_error", "model_not_found", None),
        (ContextLengthError("long", param="input"), "invalid_request_error", "context_length_exceeded", "input"),
        (InvalidRequestError("bad"), "invalid_request_error", "invalid_argument", None),
        (OverloadedError("later"), "rate_limit_error", "rate_limit_exceeded", None),
        (MonthUsedError("next month"), "rate_limit_error", "insufficient_quota", None),
        (RequestFailedError("failed"), "server_error", "internal", None),
    ],
)
def test_errors_have_openais_shape(error, kind, code, param):
    body = openai_error(error)
    assert body == {"error": {"message": error.message, "type": kind, "code": code, "param": param}}


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 5, "echo": True}])
def test_a_truncation_that_cannot_be_made_is_refused(fields):
    with pytest.raises(InvalidRequestError, check=lambda error: error.param == "truncate_prompt_tokens"):
        completion(**fields)


def test_a_number_without_a_fraction_is_whole():
    request = completion(n=2.0, logprobs=1.0, best_of=2.0, max_tokens=3.0)
    assert (request.n, request.logprobs, request.best_of) == (2, 1, 2)
    for value in (1.5, True, "1"):
        with pytest.raises(InvalidRequestError, check=lambda error: error.param == "n"):
            completion(n=value)
