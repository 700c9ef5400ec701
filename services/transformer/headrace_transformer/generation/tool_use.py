"""What a model's own syntax makes of a request with functions, and of its answer; between pipeline and text."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.structured_outputs import constraint_of
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.text.answer_parser import AnswerParser
from headrace_transformer.text.answer_parts import Content, Part
from headrace_transformer.text.answer_syntax import AnswerSyntax
from headrace_transformer.text.reasoning_grammar import after_reasoning, form_rule
from headrace_transformer.text.tokenizer import TextTokenizer
from headrace_transformer.text.tool_grammars import calls_grammar
from headrace_transformer.text.tools import ToolUse

_PROMPT_END = 16  # Tokens that are enough for a mark of the reasoning.


def check_tools(request: TextRequest, model: str, syntax: AnswerSyntax) -> None:
    """Refuses functions for a model that cannot be given them, or whose calls could not be read."""
    if request.tools is None:
        return
    if not syntax.takes_tools:
        raise InvalidRequestError(f"the chat template of model {model!r} has no place for tools", param="tools")
    if not syntax.tools:
        raise InvalidRequestError(
            f"model {model!r} writes tool calls in a format that is not known; TRANSFORMER_TOOL_FORMATS can name it",
            param="tools",
        )


def formed(
    form: str, tools: ToolUse | None, syntax: AnswerSyntax, tokenizer: TextTokenizer, prompt_ids: Sequence[int]
) -> dict[str, Any]:
    """The sampling parameter for an answer of calls, if they are required, else of the `form` ("" for none) or calls.

    Without a form text may be in place of calls of strict functions. All begin after the reasoning. Empty if the form
    is the whole answer: a grammar is always, being the caller's own.
    """
    constraint = constraint_of(form) if form else None
    if tools is not None and tools.is_required:
        constraint = None
    elif tools is not None and tools.is_strict and constraint is None:
        tools = tools.loosened
    elif constraint is None or form_rule(constraint) is None:
        return {}
    reasoning, is_open = syntax.reasoning_after(_prompt_end(tokenizer, prompt_ids))
    ids = tokenizer.decoder.grammar_ids(syntax.marks(with_tools=tools is not None))
    if tools is not None:
        grammar = calls_grammar(tools, syntax.tools, ids, reasoning, is_open, constraint)
    elif reasoning is None or constraint is None:
        return {}
    else:
        grammar = after_reasoning([str(form_rule(constraint))], reasoning, is_open, ids)
    return {"structured_outputs": {"grammar": grammar}}


def parser_of(
    request: TextRequest, syntax: AnswerSyntax, tokenizer: TextTokenizer, prompt_ids: Sequence[int]
) -> AnswerParser | None:
    """The parser of the answer; None if it is text alone."""
    if not request.has_parts or not (syntax.reasoning or request.tools):
        return None
    seed = random.getrandbits(64) if request.default_seed is None else request.default_seed
    return _parser(request.tools, seed, syntax, tokenizer, prompt_ids)


def parts_of(
    text: str,
    tools: ToolUse | None,
    seed: int,
    syntax: AnswerSyntax,
    tokenizer: TextTokenizer,
    prompt_ids: Sequence[int],
) -> Sequence[Part]:
    """The parts of a whole answer, with the ids of calls that the request had with this `default_seed`."""
    parser = _parser(tools, seed, syntax, tokenizer, prompt_ids)
    if parser is None:
        return [Content(text)]
    parser.push_rest(text)
    parser.flush()
    return parser.taken().parts


def _parser(
    tools: ToolUse | None, seed: int, syntax: AnswerSyntax, tokenizer: TextTokenizer, prompt_ids: Sequence[int]
) -> AnswerParser | None:
    return syntax.parser(
        _prompt_end(tokenizer, prompt_ids) if syntax.reasoning else "",
        None if tools is None else tools.names,
        _call_ids(syntax.tools, seed),
        None if tools is None or tools.is_parallel else 1,
    )


def _prompt_end(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> str:
    return tokenizer.text_of(prompt_ids[-_PROMPT_END:])


def _call_ids(tool_format: str, seed: int) -> Callable[[int], str]:
    return partial(_mistral_call_id if tool_format == "mistral" else _call_id, seed)


def _call_id(seed: int, index: int) -> str:
    """The id of a call of an answer, the same at each repetition of the answer."""
    return f"call_{_digest(seed, index)[:24]}"


def _mistral_call_id(seed: int, index: int) -> str:
    """The same for templates that refuse any id but of nine letters and digits."""
    return _digest(seed, index)[:9]


def _digest(seed: int, index: int) -> str:
    return hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16, person=b"tool call id").hexdigest()
