"""Calls of functions and reasoning in an answer's text: each format, whole and cut anywhere."""

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_transformer.text.answer_parser import REASONING_FORMATS, AnswerParser, AnswerSyntax, ReasoningParser
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Reasoning, merged
from headrace_transformer.text.tool_calls import PARSERS
from headrace_transformer.text.tools import ToolFunction, ToolUse

NAMES = ("weather", "add")
TOOLS = ToolUse(tuple(ToolFunction(name, "{}", "{}") for name in NAMES))
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": [1, {"x": "}\\"{"}]}'
WEATHER = f'{{"name": "weather", "arguments": {PARIS}}}'
OTHER = f'{{"name":"add","parameters":{ROME}}}'
ORDER = f'{{"arguments": {PARIS}, "id": "7", "name": "weather"}}'
TEXT = f'{{"name": "weather", "arguments": {json.dumps(PARIS)}}}'


def parser(tool_format, reasoning=None, is_open=False, max_calls=None):
    tools = None if tool_format is None else PARSERS[tool_format](NAMES, "call-{}".format)
    split = None if reasoning is None else ReasoningParser(REASONING_FORMATS[reasoning], is_open)
    return AnswerParser(split, tools, max_calls)


def parts_of(pieces, *arguments, flush=True, **options):
    """The parts of an answer, as (kind, text) in order: calls as one pair of name and arguments."""
    made = parser(*arguments, **options)
    parts = []
    for piece in pieces:
        made.push(piece)
        parts += made.taken().parts
    if flush:
        made.flush()
        parts += made.taken().parts
    return merged(parts)


def simple(parts, call_id="call-{}"):
    """Content as text, reasoning as ("reasoning", text), calls as (name, arguments)."""
    found, arguments = [], {}
    for part in parts:
        if isinstance(part, Content):
            found.append(part.text)
        elif isinstance(part, Reasoning):
            found.append(("reasoning", part.text))
        elif isinstance(part, CallStart):
            assert call_id is None or part.id == call_id.format(part.number)
            assert part.number == len(arguments)
            arguments[part.number] = ""
            found.append((part.name, part.number))
        else:
            arguments[part.number] += part.text
    return [(one[0], arguments[one[1]]) if isinstance(one, tuple) and one[0] != "reasoning" else one for one in found]


CALLS = {
    "hermes": {
        f"<tool_call>\n{WEATHER}\n</tool_call>": [("weather", PARIS)],
        f"I look.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n": [
            "I look.",
            ("weather", PARIS),
            ("add", ROME),
        ],
        f"<tool_call>{ORDER}</tool_call> done": [("weather", PARIS), " done"],
        f"<tool_call>{TEXT}</tool_call>": [("weather", PARIS)],
        '<tool_call>{"name": "unknown"}</tool_call>': [("unknown", "{}")],
        '<tool_call>{"name": "add", "arguments": ""}</tool_call>': [("add", "{}")],
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa': [("weather", '{"city": "Pa')],
        f"<tool_call>{WEATHER}": [("weather", PARIS)],
        f"<tool_call>{WEATHER[:-1]} and more": [("weather", PARIS), " and more"],
        f"{'1 < 2 <tool_calls> '} <tool": ["1 < 2 <tool_calls>  <tool"],
        f"<tool_call>no <tool_call>{WEATHER}</tool_call>": ["<tool_call>no", ("weather", PARIS)],
        '<tool_call>{"name": 5}</tool_call>': ['<tool_call>{"name": 5}</tool_call>'],
        '<tool_call>{"name": "weather", }</tool_call>': ['<tool_call>{"name": "weather", }</tool_call>'],
        '<tool_call>{"name": "wea': ['<tool_call>{"name": "wea'],
        '{"name": "weather", "arguments": {}}': ['{"name": "weather", "arguments": {}}'],
        "  a \n": ["  a \n"],
    },
    "llama": {
        OTHER: [("add", ROME)],
        f"\n<|python_tag|>{OTHER};{WEATHER}": [("add", ROME), ("weather", PARIS)],
        f'{{"type": "function", "name": "add", "parameters": {ROME}}}; {ORDER}': [("add", ROME), ("weather", PARIS)],
        f"I look. <|python_tag|>{OTHER}": ["I look.", ("add", ROME)],
        f"I look. {OTHER}": [f"I look. {OTHER}"],
        f"{OTHER}; and": [("add", ROME), "; and"],
        '{"name": "Paul", "parameters": {"x": 1}}': ['{"name": "Paul", "parameters": {"x": 1}}'],
        '{"city": "Rome"} is': ['{"city": "Rome"} is'],
        "<|python_tag|>print(1)": ["<|python_tag|>print(1)"],
    },
    "mistral": {
        f"[TOOL_CALLS][{WEATHER}, {OTHER}]": [("weather", PARIS), ("add", ROME)],
        f"[TOOL_CALLS] [{ORDER}]": [("weather", PARIS)],
        f"Look:[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]add{ROME}": ["Look:", ("weather", PARIS), ("add", ROME)],
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}": [("weather", PARIS)],
        f"[TOOL_CALLS]weather[ARGS] {PARIS}": [("weather", PARIS)],
        "[TOOL_CALLS]weather of Paris": ["[TOOL_CALLS]weather of Paris"],
        "[TOOL_CALLS][1, 2]": ["[TOOL_CALLS][1, 2]"],
        f"[TOOL_CALLS][{WEATHER}; x": [("weather", PARIS), "; x"],
        "[TOOL_CALLS]wea": ["[TOOL_CALLS]wea"],
        "[TOOL": ["[TOOL"],
    },
}
EVERY_CALL = [(name, text) for name, texts in CALLS.items() for text in texts]


@pytest.mark.parametrize(("tool_format", "text"), EVERY_CALL)
def test_calls_are_found_however_the_text_is_cut(tool_format, text):
    assert simple(parts_of([text], tool_format)) == CALLS[tool_format][text]
    assert parts_of(text, tool_format) == parts_of([text], tool_format)
    for at in range(len(text)):
        assert parts_of([text[:at], text[at:]], tool_format) == parts_of([text], tool_format)
        assert parts_of(text[:at], tool_format, flush=False) == parts_of([text[:at]], tool_format, flush=False)


MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
FRAGMENTS = [*MARKS, "<think>", "</think>"]
FRAGMENTS += [WEATHER, OTHER, ORDER, TEXT, PARIS, "weather", '{"name": "add"', '"', "\\", "{", "}", "[", "]", ",", ";"]
FRAGMENTS += [" ", "\n", "x", "<", " " * 70]


@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize("tool_format", [*PARSERS, None])
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=12), is_open=st.booleans())
@example(pieces=["[TOOL_CALLS]", " " * 140, "[TOOL_CALLS]", "add", PARIS], is_open=False)
@example(pieces=["[TOOL_CALLS]", " " * 140, "[", WEATHER, "]"], is_open=False)
@settings(max_examples=150, deadline=None)
def test_the_parts_of_any_text_depend_on_the_text_alone(tool_format, reasoning, pieces, is_open):
    text = "".join(pieces)
    options = {"reasoning": reasoning, "is_open": is_open}
    for end in (True, False):
        whole = parts_of([text], tool_format, flush=end, **options)
        assert parts_of(text, tool_format, flush=end, **options) == whole
        assert parts_of(pieces, tool_format, flush=end, **options) == whole
    if tool_format is None and reasoning is None:
        assert "".join(part.text for part in whole) == text


def pieces_of(text, generator):
    """The text cut at random."""
    cuts = sorted(generator.randrange(len(text) + 1) for _ in range(generator.randrange(9)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


NO_CALL = [*MARKS, "<tool", "[TOOL_", "]"]
NO_CALL += ['[{"a": 1}]', "[1, 2]", "[", "; ", ", ", " ", "\n", "\t", " " * 70, "x", "π\u2028", '"', "\\", "<|", "f(x)"]
OBJECTS = [
    '{"city": "Rome"}',
    '{"name": 5}',
    '{"name": "", "arguments": {}}',
    '{"arguments": {"a": 1}}',
    "{",
    "}",
    "{}",
]
OBJECTS += ['{"name": "weather", "arguments": {', '{"name"', "{'name': 'weather', 'arguments': {}}", '{"function": {}}']


@pytest.mark.parametrize("tool_format", PARSERS)
def test_text_without_a_call_comes_out_as_it_is(tool_format):
    generator = random.Random(8)
    for _ in range(10_000):
        objects = [] if tool_format == "mistral" else [one for one in OBJECTS if '{"name": "weather"' not in one]
        text = "".join(generator.choices(NO_CALL + objects, k=generator.randrange(12)))
        if generator.random() < 0.2:
            text += "" if tool_format == "mistral" else "x" + OBJECTS[-4]
        parts = parts_of(pieces_of(text, generator), tool_format)
        assert "".join(part.text for part in parts) == text
        assert all(isinstance(part, Content) for part in parts)


ARGUMENTS = ["{}", PARIS, ROME, '{"id": 123456789012345678901234567890, "x": 1.10, "y": 1e400}', '{"a": 1, "a": 2}']
ARGUMENTS += [
    '{\n  "q": "\\u00e9 \\ud83e\\udd84 \\"}{[ \\\\",\n  "n": [ ]\n}',
    '{"</tool_call>": "[TOOL_CALLS], <tool_call>{"}',
]


def spelled(generator, member):
    """An object that is a call in one of the accepted spellings, with its name and arguments."""
    name, arguments, space = generator.choice(NAMES), generator.choice(ARGUMENTS), generator.choice(["", " ", "\n "])
    kind = generator.choice(["object", "object", "text", "null", "list", "missing", "empty"])
    values = {"object": arguments, "text": json.dumps(arguments), "null": "null", "list": "[]", "empty": '""'}
    members = [("name", json.dumps(name) if generator.random() < 0.9 else f'"\\u{ord(name[0]):04x}{name[1:]}"')]
    if kind != "missing":
        members.append((generator.choice([member, "arguments", "parameters"]), values[kind]))
    others = [("id", '"call_1"'), ("type", '"function"'), ("note", '{"x": ["}", 1]}'), ("index", "0")]
    members += generator.sample(others, generator.randrange(3))
    if generator.random() < 0.7:
        generator.shuffle(members)
    pairs = (f'"{key}"{space}:{space}{value}' for key, value in members)
    text = "{" + space + f"{space},{space}".join(pairs) + space + "}"
    if generator.random() < 0.1:
        text = f'{{"type": "function", "function": {text}}}'
    return text, (name, arguments if kind in ("object", "text") else "{}")


def written(generator, tool_format, objects):
    """The objects as a model of a format may write them."""
    if generator.random() < 0.3:
        body = "[" + generator.choice([",", ", ", ",\n"]).join(objects) + "]"
    else:
        body = generator.choice([", ", ";", "; ", "\n", "\n\n", ""]).join(objects)
    if tool_format == "hermes":
        return f"<tool_call>\n{body}\n</tool_call>" if generator.random() < 0.8 else f"<tool_call>{body}"
    return (
        generator.choice(["[TOOL_CALLS]", "[TOOL_CALLS] "]) if tool_format == "mistral" else "<|python_tag|>"
    ) + body


@pytest.mark.parametrize("tool_format", PARSERS)
def test_no_call_is_lost_in_any_spelling(tool_format):
    generator = random.Random(8)
    member = "parameters" if tool_format == "llama" else "arguments"
    for _ in range(2000):
        expected, text = [], ""
        if generator.random() < 0.3:
            expected, text = ["I look. [1]"], "I look. [1]" + generator.choice(["", "\n\n"])
        marks = [
            [spelled(generator, member) for _ in range(generator.randint(1, 3))] for _ in range(generator.randint(1, 2))
        ]
        if tool_format == "mistral" and generator.random() < 0.3:
            text += "[TOOL_CALLS]weather[ARGS]" + PARIS
            expected.append(("weather", PARIS))
        for mark in marks:
            text += written(generator, tool_format, [one for one, _ in mark]) + generator.choice(["", "\n"])
            expected += [call for _, call in mark]
        if generator.random() < 0.3:
            text, expected = text.rstrip() + " Done. ", [*expected, " Done. "]
        assert simple(parts_of(pieces_of(text, generator), tool_format)) == expected, text


@pytest.mark.parametrize("end", ["", "\n", "\n<", "\n</tool_c", "</tool_call"])
def test_the_end_of_a_call_that_an_answer_cuts_off_is_no_text(end):
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    assert simple(parts_of(text + end, "hermes")) == simple(parts_of(text + "\n</tool_call>", "hermes"))


def test_only_the_first_call_is_kept_on_request():
    text = f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{OTHER}</tool_call>"
    assert simple(parts_of(text, "hermes", max_calls=1)) == [("weather", PARIS)]


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nHm, 1 < 2.\n</think>\n\nYes.", False, [("reasoning", "Hm, 1 < 2."), "Yes."]),
        ("Hm.</think>Yes. <think>", True, [("reasoning", "Hm."), "Yes. <think>"]),
        ("\n\n</think>\n\nYes.", True, ["Yes."]),
        (" Yes.</think>", False, [" Yes.</think>"]),
        ("<think>Hm</thi", False, [("reasoning", "Hm</thi")]),
        ("<thi", False, ["<thi"]),
        (" ", False, [" "]),
        ("Hm.\n</think>\n", True, [("reasoning", "Hm.")]),
    ],
)
def test_reasoning_comes_before_the_answer(text, is_open, parts):
    for pieces in ([text], text):
        assert simple(parts_of(pieces, None, reasoning="think", is_open=is_open)) == parts


FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
CALL = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ROME}"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THOUGHT}Hm.{NEXT}{FINAL}Yes.", [("reasoning", "Hm."), "Yes."]),
        (f"{FINAL}Yes.", ["Yes."]),
        (f"{THOUGHT}Hm.<|end|><|start|>ass", [("reasoning", "Hm.")]),
        (f"{THOUGHT}Hm.{NEXT}{THOUGHT}So.{NEXT}{FINAL}Yes.<|return|>", [("reasoning", "Hm.\nSo."), "Yes."]),
        (f"{FINAL}Yes.{NEXT}{FINAL}And no.", ["Yes.\nAnd no."]),
        (f"{THOUGHT}Hm.{NEXT}{CALL}<|call|>", [("reasoning", "Hm."), ("add", ROME)]),
        (f"{CALL}{NEXT} to=functions.weather<|channel|>commentary json<|message|>", [("add", ROME), ("weather", "{}")]),
        (" to=functions.add<|channel|>analysis json<|message|>{", [("add", "{")]),
        (f"<|channel|>commentary<|message|>I add.{NEXT}{CALL}", ["I add.", ("add", ROME)]),
        ("<|channel|>commentary to=python<|message|>1 + 1", [("reasoning", "1 + 1")]),
        (f"Yes.{NEXT}{THOUGHT}", ["Yes."]),
        ("to=5", ["to=5"]),
        ("<|channel|>ana", []),
        (f"<|channel|>{'x' * 600}<|message|>", [f"<|channel|>{'x' * 600}<|message|>"]),
        (" 1 <|", [" 1 <|"]),
        (" ", [" "]),
    ],
)
def test_messages_of_gpt_oss_are_reasoning_calls_and_answer(text, parts):
    for pieces in ([text], text):
        made = AnswerSyntax("harmony", "harmony").parser("<|start|>assistant", TOOLS, 1)
        found = []
        for piece in pieces:
            made.push(piece)
            found += made.taken().parts
        made.flush()
        assert simple(merged(found + made.taken().parts), call_id=None) == parts


def test_without_functions_a_call_of_gpt_oss_is_text():
    syntax = AnswerSyntax("harmony", "harmony")
    assert syntax.parts_of(f"{CALL}<|call|>", "", None, 1) == [Content(ROME)]
    assert syntax.parts_of("So.", "assistant<|channel|>analysis<|message|>", None, 1) == [Reasoning("So.")]


def test_reasoning_of_gpt_oss_that_the_settings_leave_in_the_text_stays_there_beside_calls():
    parts = AnswerSyntax("harmony", "").parts_of(f"{THOUGHT}Hm.{NEXT}{CALL}<|call|>", "<|start|>assistant", TOOLS, 1)
    assert simple(parts, call_id=None) == ["Hm.", ("add", ROME)]


def test_calls_in_the_reasoning_are_none_and_its_tokens_are_counted():
    call = f"<tool_call>{WEATHER}</tool_call>"
    made = parser("hermes", reasoning="think")
    for token in ("<think>", "maybe", call, "</think>", "\n", call):
        made.push(token)
    made.flush()
    answer = made.taken()
    assert simple(answer.parts) == [("reasoning", f"maybe{call}"), ("weather", PARIS)]
    assert answer.reasoning_tokens == 4


def test_an_object_beyond_the_limit_is_text():
    text = '<tool_call>{"x": "' + "y" * 70_000 + '", "name": "add"}</tool_call>'
    assert parts_of([text], "hermes") == [Content(text)]
    assert parts_of([text[i : i + 900] for i in range(0, len(text), 900)], "hermes") == [Content(text)]
    assert not any(isinstance(part, CallArguments) for part in parts_of([text], "llama"))
