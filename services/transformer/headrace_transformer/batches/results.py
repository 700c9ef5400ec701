"""The results of a batch: lines of JSON that are appended to its output file or its error file.

One process has them open at a time. What another one left is read first: an unfinished last line is cut off, and every
custom_id with a result is `done`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson


class Result(NamedTuple):
    """The result of a line. `body` is the JSON of an answer with an HTTP `status`; without one there is an `error`."""

    custom_id: str
    request_id: str
    status: int = 0
    body: bytes = b""
    error: dict[str, str] | None = None

    @property
    def is_error(self) -> bool:
        return not 200 <= self.status < 300

    def line(self, batch_id: str, number: int) -> bytes:
        """The line of the file for the line `number` of the input."""
        response: dict[str, Any] | None = None
        if self.status:
            body = orjson.Fragment(self.body)
            response = {"status_code": self.status, "request_id": self.request_id, "body": body}
        line_id = f"{batch_id.replace('batch_', 'batch_req_')}-{number}"
        written = {"id": line_id, "custom_id": self.custom_id, "response": response, "error": self.error}
        return orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE)


class ResultFile:
    """One of the two files; `count` lines are in it. Every method may block and raises OSError."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._size = 0
        self._path = path

    def recover(self) -> set[str]:
        """Cuts off what is unfinished; the custom_ids with a result."""
        self.count = self._size = 0
        done: set[str] = set()
        if not self._path.exists():
            return done
        with self._path.open("rb") as file:
            for line in file:
                custom_id = _custom_id(line)
                if custom_id is None:
                    break
                done.add(custom_id)
                self.count += 1
                self._size += len(line)
        os.truncate(self._path, self._size)
        return done

    def append(self, lines: Iterable[bytes]) -> None:
        """Appends the lines and writes them through to the disk: all of them, or an OSError and none."""
        taken = list(lines)
        if not taken:
            return
        data = b"".join(taken)
        try:
            with self._path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(self._path, self._size)
            raise
        self._size += len(data)
        self.count += len(taken)


def _custom_id(line: bytes) -> str | None:
    """The custom_id of a result, None for one that is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None
