"""Grammars by which an answer is one or more calls of functions, in a model's own format.

In llguidance's form of Lark, where a special token of the model stands by its id. The arguments follow the function's
schema; keywords of JSON Schema that llguidance does not have are ignored. Reasoning stays free.
Source: docs/syntax.md and docs/json_schema.md of llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from services.transformer.text.reasoning import ReasoningMarks
from services.transformer.text.reasoning_grammar import after_reasoning, mark_symbol, quoted
from services.transformer.text.tool_schemas import arguments_schema
from services.transformer.text.tools import ToolFunction, ToolUse

# As models write JSON, without more white space.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}


def calls_grammar(
    tools: ToolUse,
    tool_format: str,
    token_ids: Mapping[str, int],
    reasoning: ReasoningMarks | None = None,
    is_open: bool = False,
) -> str:
    """The grammar of calls of `tools`; see `after_reasoning`."""
    return after_reasoning(_RULES[tool_format](tools, token_ids), reasoning, is_open, token_ids)


def _hermes(tools: ToolUse, ids: Mapping[str, int]) -> list[str]:
    begin, end = mark_symbol("<tool_call>", ids), mark_symbol("</tool_call>", ids)
    return [
        _several(tools, r'"\n"'),
        rf'call: {begin} "\n" function "\n" {end}',
        *_functions(tools, "arguments"),
    ]


def _llama(tools: ToolUse, ids: Mapping[str, int]) -> list[str]:
    return [_several(tools, '"; "'), "call: function", *_functions(tools, "parameters")]


def _mistral(tools: ToolUse, ids: Mapping[str, int]) -> list[str]:
    begin = mark_symbol("[TOOL_CALLS]", ids)
    if "[ARGS]" in ids:
        functions = [
            f"function_{number}: {quoted(function.name)} {mark_symbol('[ARGS]', ids)} %json {_schema(function)}"
            for number, function in enumerate(tools.functions)
        ]
        return ["call+" if tools.is_parallel else "call", f"call: {begin} function", _any_of(tools), *functions]
    calls = _several(tools, '", "')
    return [f'{begin} "[" {calls} "]"', "call: function", *_functions(tools, "arguments")]


_RULES = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}


def _several(tools: ToolUse, separator: str) -> str:
    return f"call ({separator} call)*" if tools.is_parallel else "call"


def _functions(tools: ToolUse, member: str) -> list[str]:
    """The rules of JSON objects with the name of a function and its arguments."""
    rules = [_any_of(tools)]
    for number, function in enumerate(tools.functions):
        begin = f'{{"name": {json.dumps(function.name)}, "{member}": '
        rules.append(f'function_{number}: {quoted(begin)} %json {_schema(function)} "}}"')
    return rules


def _any_of(tools: ToolUse) -> str:
    return f"function: {' | '.join(f'function_{number}' for number in range(len(tools.functions)))}"


def _schema(function: ToolFunction) -> str:
    return json.dumps({**arguments_schema(json.loads(function.parameters)), "x-guidance": _STYLE})
