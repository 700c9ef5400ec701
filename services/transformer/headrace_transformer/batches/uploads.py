"""The body of an upload: multipart/form-data with the parts `file` and `purpose`.

Parsing may block: it is for a process of bodies, or for small ones.
"""

from io import BytesIO
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from headrace.errors import InvalidRequestError

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
