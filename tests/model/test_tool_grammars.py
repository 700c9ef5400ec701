"""Grammars of forced calls: they allow what the parsers read, in the same format, and nothing else."""

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from headrace.structured_outputs import constraint_of, read_structured_outputs
from headrace_transformer.text.answer_grammars import calls_grammar, form_grammar, form_rule
from headrace_transformer.text.answer_parser import REASONING_FORMATS
from headrace_transformer.text.detokenizer import Decoder
from headrace_transformer.text.tool_calls import PARSERS
from headrace_transformer.text.tools import ToolFunction, ToolUse

CITY = {
    "properties": {"city": {"type": "string", "format": "odd"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = ToolFunction("weather", "{}", json.dumps(CITY))
TIME = ToolFunction("time", "{}", json.dumps({"type": "object", "properties": {}}))
BOTH = ToolUse((WEATHER, TIME), is_required=True)
ONE = ToolUse((WEATHER, TIME), is_required=True, is_parallel=False)
ROME = '{"city": "Rome"}'

FORMS = {
    "json": (
        {"json": {"properties": {"city": {"type": "string"}}, "required": ["city"]}},
        '{"city": "Rome"}',
        '{"city": 5}',
    ),
    "json_object": ({"json_object": True}, "{ }", "[]"),
    "regex": ({"regex": "a/b|c"}, "a/b", "ab"),
    "escaped regex": ({"regex": r"a\/b|\\\\/"}, "a/b", "ab"),
    "choice": ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
}


def call(member, name, arguments):
    return f'{{"name": "{name}", "{member}": {arguments}}}'


def calls(tool_format, *called, args=False):
    """Calls, each a name and arguments, as a model writes them."""
    if tool_format == "hermes":
        return "\n".join(f"<tool_call>\n{call('arguments', *one)}\n</tool_call>" for one in called)
    if tool_format == "llama":
        return "; ".join(call("parameters", *one) for one in called)
    if args:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in called)
    return f"[TOOL_CALLS][{', '.join(call('arguments', *one) for one in called)}]"


@pytest.fixture(scope="module", params=["ordinary", "added", "special"])
def tokenizer(request):
    """The marks as ordinary text, as single tokens, and as special tokens."""
    made = AutoTokenizer.from_pretrained("models/storyteller")
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
    marks += ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"]
    if request.param != "ordinary":
        made.add_tokens(marks, special_tokens=request.param == "special")
    return made, from_tokenizer(made), Decoder(made.backend_tokenizer).grammar_ids(marks)


def allows(tokenizer, grammar, text):
    made, ll_tokenizer, _ = tokenizer
    matcher = LLMatcher(ll_tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = made.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("tool_format", PARSERS)
def test_only_calls_of_the_functions_are_allowed(tokenizer, tool_format):
    ids, args = tokenizer[2], "[ARGS]" in tokenizer[2]
    several, single = (calls_grammar(tools, tool_format, ids) for tools in (BOTH, ONE))
    one = calls(tool_format, ("weather", ROME), args=args)
    two = calls(tool_format, ("time", "{}"), ("weather", ROME), args=args)
    assert allows(tokenizer, several, one)
    assert allows(tokenizer, several, two)
    assert allows(tokenizer, single, one)
    assert not allows(tokenizer, single, two)
    for name, arguments in (("weather", "{}"), ("time", ROME), ("other", "{}"), ("weather", '{"city":  "Rome"}')):
        assert not allows(tokenizer, several, calls(tool_format, (name, arguments), args=args))
    assert not allows(tokenizer, several, f"Look: {one}")
    assert not allows(tokenizer, several, "")


@pytest.mark.parametrize("tool_format", PARSERS)
def test_reasoning_is_free_and_calls_follow(tokenizer, tool_format):
    ids, marks = tokenizer[2], REASONING_FORMATS["think"]
    one = calls(tool_format, ("weather", ROME), args="[ARGS]" in ids)
    opened, possible = (calls_grammar(BOTH, tool_format, ids, marks, is_open) for is_open in (True, False))
    thought = "Is it < 5?\n</th <think\n"
    assert allows(tokenizer, opened, f"{thought}</think>\n\n{one}")
    assert not allows(tokenizer, opened, one)
    assert not allows(tokenizer, opened, f"{thought}</think>Hm.{one}")
    assert allows(tokenizer, possible, f"<think>{thought}</think>{one}")
    assert allows(tokenizer, possible, one)
    assert not allows(tokenizer, possible, f"{thought}</think>{one}")


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_begins_after_the_reasoning(tokenizer, kind):
    given, fits, other = FORMS[kind]
    rule = form_rule(constraint_of(read_structured_outputs(given)))
    opened, possible = (
        form_grammar(rule, REASONING_FORMATS["think"], is_open, tokenizer[2]) for is_open in (True, False)
    )
    assert allows(tokenizer, opened, f"Hm, {other}.\n</think>\n\n{fits}")
    assert not allows(tokenizer, opened, f"Hm.\n</think>\n\n{other}")
    assert allows(tokenizer, possible, fits)
    assert not allows(tokenizer, possible, other)


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_is_in_the_channel_of_answers(tokenizer, kind):
    given, fits, other = FORMS[kind]
    rule, marks = form_rule(constraint_of(read_structured_outputs(given))), REASONING_FORMATS["harmony"]
    grammar = form_grammar(rule, marks, False, tokenizer[2])
    thought = f"{marks.open}Hm, {other}.{marks.close}"
    assert allows(tokenizer, grammar, f"{thought}{marks.answer}{fits}")
    assert allows(tokenizer, grammar, f"{marks.answer}{fits}")
    for text in (f"{thought}{marks.answer}{other}", f"{thought}{fits}", f"{marks.answer}{other}", fits):
        assert not allows(tokenizer, grammar, text)


def test_a_call_of_gpt_oss_is_a_message_to_a_function(tokenizer):
    marks, (_, fits, other) = REASONING_FORMATS["harmony"], FORMS["json"]
    thought, head = (
        f"{marks.open}Hm.{marks.close}",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
    )
    form = constraint_of(read_structured_outputs(FORMS["json"][0]))
    required, strict, formed = (
        calls_grammar(tools, "harmony", tokenizer[2], marks, False, given)
        for tools, given in ((BOTH, None), (STRICT.loosened, None), (ToolUse((WEATHER, TIME)), form))
    )
    for grammar, text, is_allowed in (
        (required, f"{head}{ROME}", True),
        (required, f"{head}{{}}", False),
        (required, f"{marks.answer}Hi", False),
        (strict, f"{head}{ROME}", True),
        (strict, f"{head}{{}}", False),
        (strict, f"{marks.answer}Hi", True),
        (formed, f"{head}{ROME}", True),
        (formed, f"{marks.answer}{fits}", True),
        (formed, f"{marks.answer}{other}", False),
        (formed, fits, False),
    ):
        for before in ("", thought):
            assert allows(tokenizer, grammar, before + text) == is_allowed, before + text


@pytest.mark.parametrize("tool_format", PARSERS)
@pytest.mark.parametrize("kind", FORMS)
def test_a_model_may_call_or_answer_in_the_form(tokenizer, tool_format, kind):
    ids = tokenizer[2]
    given, fits, other = FORMS[kind]
    form = constraint_of(read_structured_outputs(given))
    auto = ToolUse((WEATHER, TIME))
    plain, opened = (
        calls_grammar(auto, tool_format, ids, marks, marks is not None, form)
        for marks in (None, REASONING_FORMATS["think"])
    )
    one = calls(tool_format, ("weather", ROME), args="[ARGS]" in ids)
    two = calls(tool_format, ("time", "{}"), ("weather", ROME), args="[ARGS]" in ids)
    for text in (one, two, fits):
        assert allows(tokenizer, plain, text)
        assert allows(tokenizer, opened, f"Hm.</think>{text}")
    for text in (other, f"{one}{fits}", f"{fits}{one}", f"Look: {one}", ""):
        assert not allows(tokenizer, plain, text)


STRICT = ToolUse((replace(WEATHER, is_strict=True), TIME))


@pytest.mark.parametrize("marks", [None, REASONING_FORMATS["think"]], ids=["plain", "reasoning"])
@pytest.mark.parametrize("tool_format", PARSERS)
def test_a_model_may_write_text_or_calls_whose_arguments_follow_a_strict_schema(tokenizer, tool_format, marks):
    ids = tokenizer[2]
    thought = "" if marks is None else "Hm, <b>.</think>"
    several, single = (
        calls_grammar(tools, tool_format, ids, marks, marks is not None)
        for tools in (STRICT.loosened, replace(STRICT.loosened, is_parallel=False))
    )
    args = "[ARGS]" in ids
    one = calls(tool_format, ("weather", ROME), args=args)
    two = calls(tool_format, ("time", '{"zone": [1, {"a": "b"}]}'), ("weather", ROME), args=args)
    mark = "<|python_tag|>" if tool_format == "llama" else ""
    good = ["", "Hi", " 5 < 6, [TOOL", '{"answer": 5}', "[1, 2]\n", one, two, f"Look:\n\n{mark}{one}", f"{mark}{two}"]
    for text in good:
        assert allows(tokenizer, several, thought + text), text
        assert allows(tokenizer, single, thought + text) is (two not in text), text
    for arguments in ("{}", '{"city": 5}', '{"city": "Rome"', "null"):
        bad = calls(tool_format, ("weather", arguments), args=args)
        for before in ("", "Look: ", "\n "):
            assert not allows(tokenizer, several, thought + before + mark * bool(before.strip()) + bad)
    for text in (calls(tool_format, ("other", ROME), args=args), f"{one} {mark}{one}", f"{one}; {{"):
        assert not allows(tokenizer, several, thought + text), text


def test_forms_and_calls_may_begin_alike(tokenizer):
    """A form with a member `name` beside calls that are objects with one; both with references."""
    named = {"name": {"$ref": "#/$defs/text"}, "age": {"type": "integer"}}
    form = {"json": {"properties": named, "additionalProperties": False, "$defs": {"text": {"type": "string"}}}}
    city = {
        "properties": {"city": {"$ref": "#/$defs/text"}},
        "required": ["city"],
        "$defs": {"text": {"enum": ["Rome"]}},
    }
    tools = ToolUse((ToolFunction("weather", "{}", json.dumps(city)),))
    grammar = calls_grammar(tools, "llama", tokenizer[2], form=constraint_of(read_structured_outputs(form)))
    for text in (
        '{"name": "x"}',
        '{"name":"weather", "age": 3}',
        '{\n "name": "x"\n}',
        call("parameters", "weather", ROME),
    ):
        assert allows(tokenizer, grammar, text)
    assert not allows(tokenizer, grammar, call("parameters", "other", ROME))
    assert not allows(tokenizer, grammar, call("parameters", "weather", '{"city": "Paris"}'))
