"""The fields that ask for a form of the answer: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. One of them at a time.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.json_schemas import enforceable
from headrace.structured_outputs import read_structured_outputs
from headrace_transformer.frontends.openai.errors import UnsupportedFieldError

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
FIELDS = frozenset(("response_format", "structured_outputs", *_GUIDED))


def structured_outputs_of(fields: Mapping[str, Any], *format_fields: str, ignored: list[str]) -> str:
    """The sampling parameter that a request's fields state; "" for none; raises InvalidRequestError.

    `format_fields` are what an API calls `response_format`. The keywords of their schemas that are not enforced are
    added to `ignored`.
    """
    format_fields = format_fields or ("response_format",)
    texts: dict[str, str] = {}
    for name in sorted({*format_fields, *FIELDS}):
        value = fields.get(name)
        if value is None:
            continue
        keywords: set[str] = set()
        try:
            if name in format_fields:
                value = _of_format(value, name, keywords)
            text = read_structured_outputs({_GUIDED[name]: value} if name in _GUIDED else value)
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {error}", param=name) from None
        ignored += [f"{name}.{keyword}" for keyword in sorted(keywords)]
        if text:
            texts[name] = text
    if len(texts) > 1:
        first, second, *_ = texts
        raise InvalidRequestError(f"{first} and {second}: only one form of the answer is supported", param=second)
    return next(iter(texts.values()), "")


def _of_format(value: Any, name: str, ignored: set[str]) -> dict[str, Any] | None:
    """The form of a format; also llama.cpp's, Together's and Hugging Face's, where the schema is beside the type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{name}: an object with a type is needed", param=name)
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema", "json"):
        hint = ", only the types text, json_object and json_schema are"
        raise UnsupportedFieldError(name, reprlib.repr(kind), hint)
    beside = next((value[field] for field in ("schema", "value") if value.get(field) is not None), None)
    form = value.get("json_schema")
    if kind != "json_schema" or (form is None and beside is not None):
        form = {**value, "schema": beside}
    elif not isinstance(form, dict) or not isinstance(form.get("name"), str) or not form["name"]:
        raise InvalidRequestError(f"{name}: json_schema needs a name", param=name)
    if form.get("strict") not in (None, True, False):
        raise InvalidRequestError(f"{name}: strict must be true or false", param=name)
    # An answer always follows its schema, strict or not, as far as it can be enforced.
    schema = form.get("schema")
    if kind == "json_object" and isinstance(schema, dict):
        schema = {"type": "object", **schema}
    if isinstance(schema, dict | bool):
        schema = enforceable(schema, ignored, is_strict=form.get("strict") is True)
    return {"json_object": True} if schema is None else {"json": schema}
