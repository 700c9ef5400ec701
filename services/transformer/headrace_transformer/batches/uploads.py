"""The body of an upload: multipart/form-data with the parts `file` and `purpose`.

Parsing may block: it is for a process of bodies, or for small ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace.errors import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_FORM = b"multipart/form-data"
_MAX_PARTS = 16
_MAX_FIELD_BYTES = 4096  # Of what is no file.
_MAX_BOUNDARY = 70  # RFC 2046.
_MAX_FILENAME = 255


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
    form = _Form()
    parser = MultipartParser(boundary, form.callbacks())
    try:
        parser.write(body)
        parser.finalize()
    except MultipartParseError as error:
        raise InvalidRequestError(f"the body is not multipart/form-data: {error}") from None
    if not form.is_complete:
        raise InvalidRequestError("the body ends before its last part does")
    file = form.parts.get("file")
    if file is None or file.filename is None:
        raise InvalidRequestError("the part file, with a filename, is missing", param="file")
    purpose = form.parts.get("purpose")
    if purpose is None:
        raise InvalidRequestError("the part purpose is missing", param="purpose")
    return Upload(file.filename[-_MAX_FILENAME:], purpose.text()), file.data()


class _Part:
    def __init__(self) -> None:
        self.name = ""
        self.filename: str | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self.filename is None and self._size > _MAX_FIELD_BYTES:
            raise InvalidRequestError(f"the part {self.name[:64]!r} is larger than {_MAX_FIELD_BYTES} bytes")
        self._pieces.append(data)

    def data(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def text(self) -> str:
        return self.data().decode(errors="replace")


class _Form:
    """The parts by their names, as the parser finds them."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}
        self.is_complete = False
        self._part = _Part()
        self._field = self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": lambda data, start, end: self._part.add(data[start:end]),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._part = _Part()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        field, value, self._field, self._value = self._field, self._value, b"", b""
        if field.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value.decode("latin-1"))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" in options:
            self._part.filename = options[b"filename"].decode(errors="replace")

    def _headers_finished(self) -> None:
        if len(self.parts) >= _MAX_PARTS or self._part.name in self.parts:
            raise InvalidRequestError(f"the body has more than {_MAX_PARTS} parts, or two of one name")
        self.parts[self._part.name] = self._part

    def _end(self) -> None:
        self.is_complete = True
