"""What is wrong with a setting or an entry of a file, in words of its own: what is allowed, not how it was read."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import AfterValidator, ValidationError

_MESSAGES = {
    "bool": "must be true or false",
    "byte_size": "must be a size such as 64MiB or 2GB",
    "dict": "must be a mapping",
    "enum": "must be {expected}",
    "extra_forbidden": "unknown field",
    "finite_number": "must be a finite number",
    "float": "must be a number",
    "frozen_set": "must be a list",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int": "must be an integer",
    "ip_v4_address": "must be an IPv4 address such as 127.0.0.1",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "path": "must be a path",
    "set": "must be a list",
    "string": "must be a text",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "url": "must be a URL such as http://127.0.0.1:4318",
}


def matching(pattern: str, message: str) -> AfterValidator:
    """Refuses a text that does not match the whole pattern, with the message."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(message)
        return value

    return AfterValidator(check)


def unknown_setting(name: str, known: Iterable[str], hint: str) -> str:
    """The message for a name that is no setting: the setting with the most similar name, or `hint` without one."""
    similar = difflib.get_close_matches(name, list(known), 1, 0.8)
    return f"{name}: unknown setting; " + (f"did you mean {similar[0]}?" if similar else hint)


def first_fault(error: ValidationError) -> tuple[tuple[int | str, ...], str]:
    """The place and the message of the first fault; without the value, which may be secret."""
    first = error.errors(include_input=False, include_url=False)[0]
    context: dict[str, Any] = first.get("ctx", {})
    kind = first["type"]
    # A family of types, such as int_parsing and int_from_float, has one message.
    template = _MESSAGES.get(kind) or _MESSAGES.get(kind.partition("_")[0])
    if template is None:
        return first["loc"], first["msg"].removeprefix("Value error, ")
    return first["loc"], template.format(**context).replace("'", "")
