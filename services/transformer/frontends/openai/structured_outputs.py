"""The fields that ask for a form of the answer: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. One of them at a time.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from millrace.errors import InvalidRequestError
from millrace.structured_outputs import read_structured_outputs
from services.transformer.frontends.openai.errors import UnsupportedFieldError

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
FIELDS = frozenset(("response_format", "structured_outputs", *_GUIDED))


def structured_outputs_of(fields: Mapping[str, Any], *format_fields: str) -> str:
    """The sampling parameter that a request's fields state; "" for none; raises InvalidRequestError.

    `format_fields` are what an API calls `response_format`.
    """
    format_fields = format_fields or ("response_format",)
    texts: dict[str, str] = {}
    for name in sorted({*format_fields, *FIELDS}):
        value = fields.get(name)
        if value is None:
            continue
        if name in format_fields:
            value = _of_format(value, name)
        try:
            text = read_structured_outputs({_GUIDED[name]: value} if name in _GUIDED else value)
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {error}", param=name) from None
        if text:
            texts[name] = text
    if len(texts) > 1:
        first, second, *_ = texts
        raise InvalidRequestError(f"{first} and {second}: only one form of the answer is supported", param=second)
    return next(iter(texts.values()), "")


def _of_format(value: Any, name: str) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{name}: an object with a type is needed", param=name)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        hint = ", only the types text, json_object and json_schema are"
        raise UnsupportedFieldError(name, reprlib.repr(kind), hint)
    form = value.get("json_schema")
    if not isinstance(form, dict) or not isinstance(form.get("name"), str) or not form["name"]:
        raise InvalidRequestError(f"{name}: json_schema needs a name", param=name)
    if form.get("strict") not in (None, True, False):
        raise InvalidRequestError(f"{name}: strict must be true or false", param=name)
    # An answer always follows its schema, strict or not.
    schema = form.get("schema")
    return {"json_object": True} if schema is None else {"json": schema}
