"""A batch's input file: its upload, and its lines: `{"custom_id", "method", "url", "body"}`, one JSON object each.

`parse_upload` reads the body of an upload: multipart/form-data with the parts `file` and `purpose`. It may block: it is
for a process of bodies, or for small ones.

`check_lines` checks a whole file, in a process of bodies or a thread; `read_lines` reads one that is checked. Both take
pieces of whole lines from the store. Empty lines are left out.
"""

from collections.abc import Container, Iterable, Iterator
from io import BytesIO
from typing import Any, NamedTuple

import orjson
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from headrace.errors import InvalidRequestError
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


_FORM = b"multipart/form-data"
_MAX_PARTS = 16
_MAX_FIELD_BYTES = 4096  # Of what is no file.
_MAX_BOUNDARY = 70  # RFC 2046.
_MAX_FILENAME = 255
_IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": 2**40, "MAX_BODY_SIZE": 2**40}  # The body is there already.


class Upload(NamedTuple):
    """All of an upload but the file's contents."""

    filename: str
    purpose: str


def parse_upload(body: bytes, content_type: str) -> tuple[Upload, bytes]:
    """The upload in a body, and the contents of its file; raises InvalidRequestError."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != _FORM or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise InvalidRequestError("the body must be multipart/form-data with the parts file and purpose")
    parts, ends = dict[bytes, Field | File](), list[bool]()

    def add(part: Field | File) -> None:
        name = part.field_name or b""
        if len(parts) >= _MAX_PARTS or name in parts:
            raise InvalidRequestError(f"the body has more than {_MAX_PARTS} parts, or two of one name")
        parts[name] = part

    try:
        parser = FormParser(_FORM.decode(), add, add, lambda: ends.append(True), boundary, config=_IN_MEMORY)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequestError(f"the body is not multipart/form-data: {error}") from None
    if not ends:
        raise InvalidRequestError("the body ends before its last part does")
    file, purpose = parts.get(b"file"), parts.get(b"purpose")
    if not isinstance(file, File) or not isinstance(file.file_object, BytesIO):
        raise InvalidRequestError("the part file, with a filename, is missing", param="file")
    if not isinstance(purpose, Field) or len(purpose.value or b"") > _MAX_FIELD_BYTES:
        raise InvalidRequestError(f"the part purpose, of {_MAX_FIELD_BYTES} bytes at most, is missing", param="purpose")
    filename = (file.file_name or b"").decode(errors="replace")[-_MAX_FILENAME:]
    return Upload(filename, (purpose.value or b"").decode(errors="replace")), file.file_object.getvalue()
