"""Grammars of `structured_outputs`, compiled by llguidance.

The transformer checks a request's grammar, and the predictor compiles it with the model's vocabulary. llguidance's
limits bound the steps and the memory that a grammar may take. Any thread; llguidance is imported with the first
grammar, and compiles without the interpreter lock.

Source of the limits' meaning: llguidance's LLParserLimits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headrace.errors import InvalidRequestError
from headrace.structured_outputs import Constraint, constraint_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

PARAMETER = "structured_outputs"
_MAX_REASON = 500
# Between JSON's tokens: a space, or a line break and an indentation. Small models never end whitespace that may go on.
_JSON_WHITESPACE = r"( |\r?\n[ \t]{0,32})"


def check_grammar(text: str) -> None:
    """Raises InvalidRequestError for a grammar that cannot be compiled or met; without a vocabulary."""
    from llguidance import LLMatcher

    if reason := LLMatcher.validate_grammar(_grammar(text), None, limits=_limits()):
        raise grammar_error(reason)


def compile_grammar(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The matcher of a grammar at the beginning of an answer; raises InvalidRequestError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _grammar(text), log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # The first one takes the longest; copies of the matcher have it.
    if matcher.is_error():
        raise grammar_error(matcher.get_error())
    return matcher


def grammar_error(reason: str) -> InvalidRequestError:
    """The error for what llguidance reports."""
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    return InvalidRequestError(f"{PARAMETER}: {reason[:_MAX_REASON]}", param=PARAMETER)


def no_token_error() -> InvalidRequestError:
    """The error where two of these have no token in common."""
    causes = "the answer's form, the tokens that are allowed, min_tokens and the model's generation_config.json"
    return InvalidRequestError(f"{causes} leave no token at this point")


def json_options(constraint: Constraint) -> JsonCompileOptions:
    """llguidance's options for the JSON of a form; a schema may have them as its `x-guidance`."""
    options: JsonCompileOptions = {"lenient": False, "whitespace_flexible": not constraint.disable_any_whitespace}
    if not constraint.disable_any_whitespace:
        options["whitespace_pattern"] = _JSON_WHITESPACE
    return options


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _grammar(text: str) -> str:
    from llguidance import LLMatcher

    constraint = constraint_of(text)
    if constraint.kind in ("json", "json_object"):
        return _json_grammar(constraint)
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.value)
    if constraint.kind == "choice":
        # Lark's strings are those of JSON.
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.value)))
    if "::=" in constraint.value:
        raise grammar_error("grammar must be llguidance's Lark ('start: ...'), not EBNF ('root ::= ...')")
    return LLMatcher.grammar_from_lark(constraint.value)


def _json_grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    schema = {"type": "object"} if constraint.kind == "json_object" else constraint.value
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options(constraint))
    except ValueError as error:  # Numbers beyond those of doubles, deep nesting.
        raise grammar_error(str(error)) from None
