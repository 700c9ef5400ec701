"""The lines of a batch's input file: `{"custom_id", "method", "url", "body"}`, one JSON object each.

`check_lines` checks a whole file, in a process of bodies or a thread; `read_lines` reads one that is checked. Both take
pieces of whole lines from the store. Empty lines are left out.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from headrace_transformer.batches.objects import LineError
from headrace_transformer.batches.store import Store

MAX_LINES = 50_000  # OpenAI's limit.
MAX_LINE_BYTES = 8 * 1024 * 1024  # As of the body of one request.
MAX_CUSTOM_ID = 200  # Characters; with the batch's id it makes the request's.
_MAX_ERRORS = 100
_MAX_MODELS = 100


class Line(NamedTuple):
    """A request of a batch; `number` counts from 1, `body` is JSON."""

    number: int
    custom_id: str
    body: bytes
    streams: bool


class CheckedLines(NamedTuple):
    """How many requests a file has, the first faults, and the line where each of its models is first."""

    total: int
    errors: tuple[LineError, ...]
    models: dict[str, int]


def check_stored(body: bytes, store: Store, file_id: str, endpoint: str) -> tuple[CheckedLines, bytes]:
    """`check_lines` for a process of bodies; `body` is not used."""
    return check_lines(store.pieces(file_id), endpoint), b""


def check_lines(pieces: Iterable[bytes], endpoint: str) -> CheckedLines:
    """Checks the file of a batch for an endpoint."""
    total, errors, models = 0, list[LineError](), dict[str, int]()
    first_lines: dict[str, int] = {}
    for number, line in _lines(pieces):
        total += 1
        if total > MAX_LINES:
            errors.append(LineError(code="too_many_lines", message=f"at most {MAX_LINES} requests are allowed"))
            break
        value, error = _read(line, number, endpoint)
        if error is None and value["custom_id"] in first_lines:
            where = first_lines[value["custom_id"]]
            error = _error("duplicate_custom_id", f"the custom_id is that of line {where}", "custom_id", number)
        if error is not None:
            errors.append(error)
            if len(errors) == _MAX_ERRORS:
                break
            continue
        first_lines[value["custom_id"]] = number
        model = value["body"].get("model") or ""
        if len(models) <= _MAX_MODELS:
            models.setdefault(model, number)
    if total == 0:
        errors.append(LineError(code="empty_file", message="the file has no requests"))
    if len(models) > _MAX_MODELS:
        errors.append(LineError(code="too_many_models", message=f"at most {_MAX_MODELS} models are allowed"))
    return CheckedLines(total, tuple(errors), models)


def read_lines(pieces: Iterable[bytes], done: Container[str] = ()) -> Iterator[Line]:
    """The requests of a file that `check_lines` has accepted, without those that are `done`; each step may block."""
    for number, line in _lines(pieces):
        value = orjson.loads(line)
        if value["custom_id"] not in done:
            body = value["body"]
            yield Line(number, value["custom_id"], orjson.dumps(body), bool(body.get("stream")))


def _lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1."""
    lines = (line for piece in pieces for line in piece.removesuffix(b"\n").split(b"\n"))
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _read(line: bytes, number: int, endpoint: str) -> tuple[dict[str, Any], LineError | None]:
    """The object in a line, and what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        return {}, _error("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes", None, number)
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return {}, _error("invalid_json_line", f"the line is not JSON: {error}", None, number)
    if not isinstance(value, dict):
        return {}, _error("invalid_json_line", "the line must be a JSON object", None, number)
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        return {}, _error("invalid_custom_id", message, "custom_id", number)
    if value.get("method") != "POST":
        return {}, _error("invalid_method", "method must be POST", "method", number)
    if value.get("url") != endpoint:
        return {}, _error("mismatched_url", f"url must be the batch's endpoint, {endpoint}", "url", number)
    if not isinstance(body, dict):
        return {}, _error("invalid_body", "body must be a JSON object", "body", number)
    if not isinstance(body.get("model"), str | None):
        return {}, _error("invalid_model", "body.model must be a text", "body.model", number)
    return value, None


def _error(code: str, message: str, param: str | None, line: int) -> LineError:
    return LineError(code=code, message=message[:500], param=param, line=line)
