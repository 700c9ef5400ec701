"""Errors as OpenAI writes them: `{"error": {"message", "type", "code", "param"}}`.

`code` is OpenAI's own word for the kinds in `_CODES`, else the name of the gRPC status.
Source: OpenAI's API reference, and the error classes of its Python client.
"""

import reprlib
from typing import Any

from pydantic import ValidationError

from headrace.errors import ContextLengthError, HeadraceError, InvalidRequestError, NotFoundError, OverloadedError
from headrace_transformer.generation.token_quota import MonthUsedError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: dict[type[HeadraceError], str] = {
    NotFoundError: "model_not_found",
    ContextLengthError: "context_length_exceeded",
    OverloadedError: "rate_limit_exceeded",
    MonthUsedError: "insufficient_quota",
}


class UnsupportedFieldError(InvalidRequestError):
    """A field that the API has and that is not offered here."""

    def __init__(self, name: str, value: Any, hint: str = "") -> None:
        super().__init__(f"{name}={reprlib.repr(value)} is not supported{hint}", param=name)


class NoSuchObjectError(NotFoundError):
    """No such file, batch or response, or one of another client."""


_CODES[UnsupportedFieldError] = "unsupported_parameter"


def fault_of(error: ValidationError) -> tuple[str, str]:
    """The path of the first fault in a request, "" for the whole of it, and the message."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


def openai_error(error: HeadraceError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.http_status, kind),
            "code": _CODES.get(type(error), error.status.name.lower()),
            "param": error.param,
        }
    }
