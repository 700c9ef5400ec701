"""The ids of a prompt: cut, without its oldest messages, and with the system's messages where a template takes them."""

import itertools
import json
from types import SimpleNamespace

import pytest

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import ContextLimits, SamplingParameters
from headrace_transformer.generation.preparation import Preparation, _check_model, kept_tokens
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.text import chat_templates
from headrace_transformer.text.answer_parser import AnswerSyntax, SyntaxSettings
from headrace_transformer.text.tokenizer import Chat, TextTokenizer


class Strict(TextTokenizer):
    """A tokenizer of one id for each message; its template takes system messages only at the beginning."""

    answer_syntax = AnswerSyntax()

    def __init__(self):
        """It has no files."""

    async def _in_turn(self, chat, *_):
        if any(role == "system" for role, *_ in chat.messages[1:]):
            raise InvalidRequestError("the system's message must be the first")
        return " ".join(content for _, content in chat.messages)

    async def encode(self, text, max_tokens, add_special_tokens):
        if len(words := text.split()) > max_tokens:
            raise ContextLengthError(f"{len(words)} tokens")
        return words


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")], "a\n\nc b d"),
        ([("user", "b"), ("system", "c"), ("user", "d")], "c b d"),
        ([("system", "a"), ("user", "b")], "a b"),
    ],
)
async def test_a_template_that_takes_the_system_first_gets_all_its_messages_there(messages, text):
    assert await Strict().render(Chat(messages), 9, None) == text


async def test_another_refusal_of_a_template_stays():
    with pytest.raises(InvalidRequestError, match="must be the first"):
        await Strict().render(Chat([("user", "a"), ("system", "")]), 9, None)


async def ids_of_the_newest(context, max_tokens=None, max_new_tokens=None):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [(roles[word[0]], word) for word in ["s", "u1", "a1", "u2", "a2", "u3"]]
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    request = TextRequest(CallContext("", ""), "m", messages=messages, sampling=sampling, drops_messages=True)
    limits = ContextLimits(context, is_encoder_decoder=False, max_new_tokens=max_new_tokens)
    model = SimpleNamespace(name="m", tokenizer=Strict(), limits=limits)
    return await Preparation(None, SyntaxSettings()).ids(request, model)


@pytest.mark.parametrize(("context", "kept"), [(9, "s u1 a1 u2 a2 u3"), (6, "s u2 a2 u3"), (4, "s u3"), (2, None)])
async def test_the_oldest_messages_of_a_conversation_that_is_too_long_are_left_out(context, kept):
    if kept is None:
        with pytest.raises(ContextLengthError):
            await ids_of_the_newest(context, max_tokens=1)
    else:
        assert await ids_of_the_newest(context, max_tokens=1) == kept.split()


@pytest.mark.parametrize(
    ("context", "max_new_tokens", "kept"),
    [
        (12, None, "s u1 a1 u2 a2 u3"),  # Half of the context is the answer's.
        (10, None, "s u2 a2 u3"),
        (7, 1, "s u1 a1 u2 a2 u3"),
        (7, 2, "s u2 a2 u3"),
        (2, None, "s u3"),  # The newest messages are not refused for the answer's sake.
    ],
)
async def test_an_answer_without_a_maximum_has_room_behind_the_messages_that_are_kept(context, max_new_tokens, kept):
    assert await ids_of_the_newest(context, max_new_tokens=max_new_tokens) == kept.split()


@pytest.mark.parametrize(("max_tokens", "room"), [(8, 1), (9, 0), (20, 0)])
async def test_an_answer_that_leaves_no_room_for_messages_is_refused_as_such(max_tokens, room):
    text = f"max_output_tokens={max_tokens} leaves room for {room} tokens of a prompt in the context of 9"
    with pytest.raises(ContextLengthError, match=text, check=lambda error: error.param == "max_output_tokens"):
        await ids_of_the_newest(9, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"), [(5, 90, 5), (100, None, 100), (-1, 20, 80), (-1, None, 99), (-1, 500, 1)]
)
def test_the_answer_has_room_behind_a_truncated_prompt(limit, max_tokens, kept):
    assert kept_tokens(limit, ContextLimits(100, is_encoder_decoder=False), max_tokens) == kept


def test_a_prompt_of_its_own_limit_may_fill_it():
    assert kept_tokens(-1, ContextLimits(100, is_encoder_decoder=True), 20) == 100


def test_a_limit_beyond_the_context_is_refused():
    with pytest.raises(InvalidRequestError, check=lambda error: error.param == "truncate_prompt_tokens"):
        kept_tokens(101, ContextLimits(100, is_encoder_decoder=False), None)


CALLS = "{% for call in messages[0].tool_calls %}{% set a = call.function.arguments %}"
TEMPLATES = {
    "text or object": CALLS + "{{ a if a is string else a | tojson }} {% endfor %}",
    "mapping": CALLS + "{% for name, value in a | items %}{{ name }}={{ value }};{% endfor %} {% endfor %}",
    "method": CALLS + "{% for name in a.keys() %}{{ name }}={{ a[name] }};{% endfor %} {% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gets_arguments_as_an_object_or_as_their_text(template):
    texts = ['{"id": 123456789012345678901}', "", '{"a": "Ro', '{"a": "x\ny"}', "[1]", "null", '{"a":' * 100_000]
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    message = ("assistant", "", json.dumps({"tool_calls": calls}))
    text = chat_templates.rendered([message], "", "m", TEMPLATES[template], {})
    if template == "text or object":
        assert text.split(" ", 2)[:2] == ['{"id":', "123456789012345678901}"]
        assert text.endswith(" ".join(["", "{}", *texts[2:], ""]))
    else:
        others = [f"arguments={text};" for text in texts[2:]]
        assert text == " ".join(["id=123456789012345678901;", "", *others, ""])


# Of each kind: the arguments as an object that is written as JSON, as a text, and as a text beside no content.
CALLING = {
    "object": "{% for c in m.tool_calls or [] %}[{{ c.function.name }}|{{ c.function.arguments | tojson }}]"
    "{% endfor %}",
    "added text": "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + '|' + c.function.arguments + ']' }}"
    "{% endfor %}",
    "written text": "{% for c in m.tool_calls or [] %}[{{ c.function.name }}|{{ c.function.arguments }}]{% endfor %}",
    "no empty message": "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}|"
    "{{ c.function.arguments | tojson }}]{% endfor %}{% endif %}"
    "{% if m.content is not none %}{{ '|' if m.tool_calls }}{{ m.content }}{% endif %};",
    "no content": "{% if m.content is none %}{% for c in m.tool_calls %}{{ '[' + c.function.name + '|' +"
    " c.function.arguments + ']' }}{% endfor %};{% else %}{{ m.content }};{% endif %}",
}


@pytest.mark.parametrize("template", CALLING)
def test_calls_are_written_in_the_form_that_a_template_reads(template):
    calls = [{"function": {"name": name, "arguments": '{"a": "é", "b": null}'}} for name in ("f", "g")]
    messages = [("user", "U"), ("assistant", "", json.dumps({"tool_calls": calls})), ("tool", "T")]
    writes = "{{ m.content }};" if "none" not in CALLING[template] else ""
    written = f"{{{{ tools | tojson }}}}{{% for m in messages %}}{CALLING[template]}{writes}{{% endfor %}}"
    wanted = '["f", "g"]U;[f|{"a": "é", "b": null}][g|{"a": "é", "b": null}];T;'
    assert chat_templates.rendered(messages, '["f", "g"]', "m", written, {}) == wanted


ONLY_ONE = (
    "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}RULE"
    "{{ m.thinking or m.content }}[{{ f.name }}{{ f.arguments | tojson }}]"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "rule",
    [
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}",
        "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}",
    ],
)
def test_a_template_of_single_calls_gets_each_with_its_result(rule):
    calls = [{"id": city, "function": {"name": "f", "arguments": f'{{"a": "{city}"}}'}} for city in ("Bonn", "Rome")]
    thought = "content" if "length" in rule else "thinking"
    fields = {"tool_calls": calls, "reasoning_content": "Hm." if thought == "thinking" else None}
    messages = [("user", "U"), ("assistant", "I look.", json.dumps(fields))]
    messages += [("tool", city, json.dumps({"tool_call_id": city})) for city in ("Rome", "Bonn")]
    text = chat_templates.rendered(messages, "", "m", ONLY_ONE.replace("RULE", rule), {})
    before = "I look." if thought == "content" else "Hm.\nI look."
    assert text == f'U;{before}[f{{"a": "Bonn"}}]Bonn;[f{{"a": "Rome"}}]Rome;'


@pytest.mark.parametrize("call_id", ["call_1", ""])
def test_a_result_stays_in_its_turn_whatever_ids_calls_have(call_id):
    def turn(*cities):
        calls = [{"id": call_id, "function": {"name": "f", "arguments": f'{{"a": "{city}"}}'}} for city in cities]
        answers = [("tool", city.upper(), json.dumps({"tool_call_id": call_id})) for city in cities]
        return [("user", "U"), ("assistant", "", json.dumps({"tool_calls": calls})), *answers]

    text = chat_templates.rendered([*turn("Bonn"), *turn("Rome", "Oslo")], "", "m", ONLY_ONE.replace("RULE", ""), {})
    assert text == 'U;[f{"a": "Bonn"}]BONN;U;[f{"a": "Rome"}]ROME;[f{"a": "Oslo"}]OSLO;'


WHOLE, PARTS = "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize("roles", list(itertools.product((WHOLE, PARTS), repeat=3)))
def test_each_role_gets_its_contents_as_the_template_writes_them(roles):
    written = "".join(
        f"{{% if m.role == '{role}' %}}{one}{{% endif %}}"
        for role, one in zip(("system", "user", "assistant"), roles, strict=True)
    )
    template = f"{{% for m in messages %}}{written};{{% endfor %}}{{# text #}}"
    messages = [["system", "S"], ["user", "U"], ["assistant", "A"], ["user", "V"]]
    assert chat_templates.rendered(messages, "", "m", template, {}) == "S;U;A;V;"


ENGINES_OWN = [
    {"include_reasoning": False},
    {"logprob_token_ids": [5]},
    {"mm_processor_kwargs": {"num_crops": 4}},
    {"repetition_detection": {"min_count": 3}},
    {"thinking_token_budget": 0},
]


@pytest.mark.parametrize("fields", ENGINES_OWN)
async def test_a_field_of_engines_that_changes_the_answer_is_refused_for_other_models(fields):
    request = TextRequest(CallContext("", ""), "m", prompt_ids=[5], engine_fields=fields)
    model = SimpleNamespace(name="m", pool=None, tokenizer=Strict(), defaults=SamplingParameters())
    with pytest.raises(InvalidRequestError, match="is not supported") as raised:
        await Preparation(None, SyntaxSettings()).prepared(request, model)
    assert raised.value.param == next(iter(fields))


@pytest.mark.parametrize("fields", [{"include_reasoning": True, "logprob_token_ids": []}, *ENGINES_OWN])
async def test_it_is_not_where_it_has_no_effect_or_the_engine_has_it(fields):
    request = TextRequest(CallContext("", ""), "m", prompt_ids=[5], engine_fields=fields)
    pool = object() if fields in ENGINES_OWN else None
    _check_model(request, SimpleNamespace(name="m", pool=pool), SamplingParameters())
