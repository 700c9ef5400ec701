"""Grammars of answers whose form begins after the reasoning, which is free.

In llguidance's form of Lark, where a special token of the model stands by its id.
Source: docs/syntax.md and docs/json_schema.md of llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from headrace.grammars import json_options
from headrace.structured_outputs import Constraint
from headrace_transformer.text.reasoning import ReasoningMarks


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
    if reasoning.close in token_ids:
        thought = [f"thought: /(.|\\n)*/ {mark_symbol(reasoning.close, token_ids)} /\\s*/"]
    else:
        thought = ["thought: reasoning /\\s*/", f"reasoning[suffix={quoted(reasoning.close)}]: /(.|\\n)*/"]
    return "\n".join([f"start: {start} answer", f"answer: {first}", *others, *thought])


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
    return f"<[{token_ids[text]}]>" if text in token_ids else quoted(text)


def quoted(text: str) -> str:
    """A string of the grammar."""
    return json.dumps(text)
