"""Errors as Anthropic writes them: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

Source: Anthropic's API reference.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import HeadraceError
from headrace.telemetry.identity import current_request_id

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: HeadraceError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    described = {"type": _TYPES.get(error.http_status, kind), "message": error.message}
    return {"type": "error", "error": described, "request_id": current_request_id() or None}
