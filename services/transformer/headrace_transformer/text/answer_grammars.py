"""Grammars by which an answer is one or more calls of functions, in a model's own format, has another form, or is text.

In llguidance's form of Lark, where a special token of the model stands by its id. The arguments follow the function's
schema, as far as it is `enforceable`. A form begins after the reasoning, which is free.
Source: docs/syntax.md and docs/json_schema.md of llguidance.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.grammars import json_options
from headrace.json_schemas import enforceable
from headrace.structured_outputs import Constraint
from headrace_transformer.text.answer_parser import HARMONY, ReasoningMarks
from headrace_transformer.text.tool_calls import PARSERS
from headrace_transformer.text.tools import ToolFunction, ToolUse

# The beginning of an object that the parser of Llama's format may read as a call.
_BARE = r'[\s\x1c-\x1f]*(\[\s*)?\{\s*"([^"]*\\|(name|type|id|function|arguments|parameters)")'
# As models write JSON, without more white space.
_STYLE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    tools: ToolUse,
    tool_format: str,
    token_ids: Mapping[str, int],
    reasoning: ReasoningMarks | None = None,
    is_open: bool = False,
    form: Constraint | None = None,
) -> str:
    """The grammar of calls of `tools`, or of what may be in their place, see `after_reasoning`.

    That is a `form`; without one, unless the calls are required, any text, which may also be before them.
    """
    rule = None if form is None else form_rule(form)
    # Two ways to write white space in one grammar would take it from each other.
    style = _STYLE if form is None else json_options(form)
    rest, *rules = _RULES[tool_format](tools, token_ids, style)
    is_bare = tool_format in ("llama", HARMONY)
    calls = rest if is_bare else f"{mark_symbol(PARSERS[tool_format].MARK, token_ids)} {rest}"
    if rule is not None:
        first = ["answer_form | calls", *_form(rule, reasoning, token_ids), f"calls: {calls}"]
    elif tools.is_required:
        first = [calls]
    elif tool_format == HARMONY:
        first = ["answer_form | calls", *_form("/(.|\\n)*/", reasoning, token_ids), f"calls: {calls}"]
    else:
        bare = f" | {rest}" if tool_format == "llama" else ""
        first = ["text | calls", f"calls: until_mark {rest}{bare}", *_text(tool_format, token_ids)]
    return after_reasoning([*first, *rules], reasoning, is_open, token_ids)


def _text(tool_format: str, ids: Mapping[str, int]) -> list[str]:
    """Any text that has no calls, alone and up to the mark of calls."""
    mark, text = PARSERS[tool_format].MARK, r"/(.|\n)*/"
    if tool_format == "llama":
        text = rf"{text} & ~/{_BARE}(.|\n)*/"
    until = f": TEXT {mark_symbol(mark, ids)}" if mark in ids else f"[suffix={quoted(mark)}]: {text}"
    return ["text: TEXT", rf"TEXT: {text} & ~/(.|\n)*{re.escape(mark)}(.|\n)*/", f"until_mark{until}"]


# Of what follows the first mark.


def _hermes(tools: ToolUse, ids: Mapping[str, int], style: Mapping[str, Any]) -> list[str]:
    begin, end = mark_symbol("<tool_call>", ids), mark_symbol("</tool_call>", ids)
    return [
        _several(tools, rf'"\n" {begin}'),
        rf'call: "\n" function "\n" {end}',
        *_functions(tools, "arguments", style),
    ]


def _llama(tools: ToolUse, ids: Mapping[str, int], style: Mapping[str, Any]) -> list[str]:
    return [_several(tools, '"; "'), "call: function", *_functions(tools, "parameters", style)]


def _mistral(tools: ToolUse, ids: Mapping[str, int], style: Mapping[str, Any]) -> list[str]:
    begin = mark_symbol("[TOOL_CALLS]", ids)
    if "[ARGS]" in ids:
        args = mark_symbol("[ARGS]", ids)
        functions = [
            f"function_{number}: {quoted(function.name)} {args} {_json(_schema(function), function, style)}"
            for number, function in enumerate(tools.functions)
        ]
        return [_several(tools, begin), "call: function", _any_of(tools), *functions]
    calls = _several(tools, '", "')
    return [f'"[" {calls} "]"', "call: function", *_functions(tools, "arguments", style)]


def _harmony(tools: ToolUse, ids: Mapping[str, int], style: Mapping[str, Any]) -> list[str]:
    """A message to a function, whose end ends the answer."""
    functions = []
    for number, one in enumerate(tools.functions):
        head = f"<|channel|>commentary to=functions.{one.name} <|constrain|>json<|message|>"
        functions.append(f"function_{number}: {mark_symbol(head, ids)} {_json(_schema(one), one, style)}")
    return ["function", _any_of(tools), *functions]


_RULES = {"hermes": _hermes, "llama": _llama, "mistral": _mistral, HARMONY: _harmony}


def _several(tools: ToolUse, separator: str) -> str:
    return f"call ({separator} call)*" if tools.is_parallel else "call"


def _functions(tools: ToolUse, member: str, style: Mapping[str, Any]) -> list[str]:
    """The rules of JSON objects with the name of a function and its arguments."""
    rules = [_any_of(tools)]
    for number, function in enumerate(tools.functions):
        if style is _STYLE:  # In one piece, which is longer than the beginning of any text that is no call.
            begin = quoted(f'{{"name": {quoted(function.name)}, "{member}": ')
            rules.append(f'function_{number}: {begin} {_json(_schema(function), function, style)} "}}"')
            continue
        members = {"name": {"const": function.name}, member: _schema(function, f"#/properties/{member}")}
        call = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        rules.append(f"function_{number}: {_json(call, function, style)}")
    return rules


def _any_of(tools: ToolUse) -> str:
    return f"function: {' | '.join(f'function_{number}' for number in range(len(tools.functions)))}"


def ignored_keywords(tools: ToolUse) -> list[str]:
    """The keywords of JSON Schema that the grammar does not enforce, each after its function; raises ValueError."""
    found = []
    for function in tools.functions:
        ignored: set[str] = set()
        _schema(function, ignored=ignored)
        found += [f"{function.name}.{name}" for name in sorted(ignored)]
    return found


def _schema(function: ToolFunction, place: str = "#", ignored: set[str] | None = None) -> dict[str, Any]:
    """The schema of a function's arguments.

    An object with `properties` has no others unless its schema says more about them, which is how vLLM's grammars read
    schemas too: a function knows no other arguments, and few declarations state it.
    """
    schema = {"type": "object", **json.loads(function.parameters)}
    return enforceable(schema, ignored, function.is_strict, closes=True, place=place)


def _json(schema: dict[str, Any], function: ToolFunction, style: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {**style, 'lenient': not function.is_strict}})}"


def after_reasoning(
    rules: Sequence[str], reasoning: ReasoningMarks | None, is_open: bool, token_ids: Mapping[str, int]
) -> str:
    """The grammar of what the first of the rules matches, which has no name here, after the reasoning.

    `token_ids` are the marks that are special tokens to llguidance. The reasoning comes if the prompt has begun it
    (`is_open`), and otherwise may come.
    """
    first, *others = rules
    if reasoning is None:
        return "\n".join([f"start: {first}", *others])
    start = "thought" if is_open else f"({mark_symbol(reasoning.open, token_ids)} thought)?"
    if token_ids.keys() & ReasoningMarks(reasoning.close, "").tokens:
        thought = [f"thought: /(.|\\n)*/ {mark_symbol(reasoning.close, token_ids)} /\\s*/"]
    else:
        thought = ["thought: reasoning /\\s*/", f"reasoning[suffix={quoted(reasoning.close)}]: /(.|\\n)*/"]
    return "\n".join([f"start: {start} answer", f"answer: {first}", *others, *thought])


def form_grammar(rule: str, reasoning: ReasoningMarks | None, is_open: bool, token_ids: Mapping[str, int]) -> str:
    """The grammar of a form's rule after the reasoning, see `after_reasoning`."""
    return after_reasoning(["answer_form", *_form(rule, reasoning, token_ids)], reasoning, is_open, token_ids)


def _form(rule: str, reasoning: ReasoningMarks | None, token_ids: Mapping[str, int]) -> list[str]:
    mark = mark_symbol(reasoning.answer, token_ids) if reasoning is not None else ""
    return [f"answer_form: {mark} form", f"form: {rule}"]


def form_rule(form: Constraint) -> str | None:
    """A form of `structured_outputs` as a rule; None for one that cannot be a part of a grammar."""
    if form.kind == "regex":
        escaped = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else "\\/", form.value, flags=re.DOTALL)
        return f"/{escaped}/"
    if form.kind == "choice":
        return " | ".join(map(quoted, form.value))
    if form.kind == "grammar":
        return None
    schema = {"type": "object"} if form.kind == "json_object" else form.value
    return f"%json {json.dumps({**schema, 'x-guidance': json_options(form)})}"


def mark_symbol(text: str, token_ids: Mapping[str, int]) -> str:
    """A mark in a grammar, of which some parts may be special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, token_ids))})", text) if token_ids else [text]
    return " ".join(f"<[{token_ids[part]}]>" if part in token_ids else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """A string of the grammar."""
    return json.dumps(text)
