"""The sampling parameter `structured_outputs`: the form that an answer must have. Pure.

An object, or its JSON text, with exactly one of

- `json`: a JSON schema, as an object or its text,
- `json_object`: true for any JSON object,
- `regex`: a regular expression that the whole answer matches, in the syntax of Rust's crate `regex`,
- `choice`: a list of texts, of which the answer is one,
- `grammar`: a grammar in llguidance's form of Lark;

and optionally `disable_any_whitespace`: true for JSON without whitespace between its tokens.

Front ends and services pass it on as the text that `read_structured_outputs` returns, a `Form`, which no other part of
the process reads again: the largest take ten milliseconds. What compiles it is in grammars.py. Source of the names:
vLLM's StructuredOutputsParams.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from headrace.json_schemas import enforceable

MAX_BYTES = 64 * 1024  # Of the text.
MAX_CHOICES = 1024
KINDS = ("json", "json_object", "regex", "choice", "grammar")

_OPTION = "disable_any_whitespace"
_TEXTS = ("json", "regex", "grammar")


class Form(str):
    """A text of `read_structured_outputs`."""

    __slots__ = ()


@dataclass(frozen=True)
class Constraint:
    """A form: one of KINDS, and its value."""

    kind: str
    value: Any
    disable_any_whitespace: bool = False


def read_structured_outputs(value: Any) -> Form:
    """The parameter as JSON text with the schema as an object; "" for none; raises ValueError."""
    if isinstance(value, Form):
        return value
    given = _object(value)
    if given is None:
        return Form()
    constraint = _constraint(given)
    fields = {constraint.kind: constraint.value} | ({_OPTION: True} if constraint.disable_any_whitespace else {})
    try:
        # The order of a schema's properties is that of the answer's.
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise _too_large()
    return Form(text)


def constraint_of(text: str) -> Constraint:
    """The form that a text of `read_structured_outputs` states."""
    fields = json.loads(text)
    disable = fields.pop(_OPTION, False)
    ((kind, value),) = fields.items()
    return Constraint(kind, value, disable)


def _object(value: Any) -> dict[str, Any] | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, dict):
        raise ValueError("an object or its JSON text is needed")
    return {str(name): each for name, each in value.items() if each is not None and each is not False}


def _constraint(given: dict[str, Any]) -> Constraint:
    disable = given.pop(_OPTION, False)
    if disable not in (True, False):
        raise ValueError(f"{_OPTION} must be true or false")
    for name in given:
        if name not in KINDS:
            raise ValueError(f"{name[:64]!r} is not supported, only {', '.join(KINDS)} and {_OPTION} are")
    if len(given) != 1:
        raise ValueError(f"exactly one of {', '.join(KINDS)} is needed, there are {len(given)}")
    ((kind, value),) = given.items()
    if kind in _TEXTS and isinstance(value, str) and len(value) > MAX_BYTES:
        raise _too_large()
    if kind == "json":
        schema = _parsed(value) if isinstance(value, str) else value
        if not isinstance(schema, (dict, bool)):
            raise ValueError("json must be a JSON schema, as an object or its text")
        return Constraint(kind, enforceable(schema), disable)
    if kind == "json_object" and value is not True:
        raise ValueError("json_object must be true or false")
    if kind in ("regex", "grammar") and not (isinstance(value, str) and value):
        raise ValueError(f"{kind} must be a text that is not empty")
    if kind == "choice":
        return Constraint(kind, _choices(value), disable)
    return Constraint(kind, value, disable)


def _choices(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("choice must be a list of texts that is not empty")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"choice has {len(value)} texts, at most {MAX_CHOICES} are allowed")
    if not all(isinstance(item, str) and item for item in value):
        raise ValueError("choice must be a list of texts, none of them empty")
    if sum(map(len, value)) > MAX_BYTES:
        raise _too_large()
    return list(value)


def _parsed(text: str) -> Any:
    if len(text) > MAX_BYTES:
        raise _too_large()
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _too_large() -> ValueError:
    return ValueError(f"more than {MAX_BYTES} bytes are not supported")
