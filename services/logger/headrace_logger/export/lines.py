"""Writes records as JSON lines in one of several shapes.

A shape makes one line of a record, or gives the reason why the record has none; `left_out` counts these reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any

from headrace_logger.export.chat import example
from headrace_logger.export.guidellm import dataset_row
from headrace_logger.export.mooncake import Trace
from headrace_logger.values import row, to_json
from headrace_protos.headrace_pb2 import PayloadRecord

Shape = Callable[[PayloadRecord], dict[str, Any] | str]

# Name of a format → its shape for one file.
SHAPES: dict[str, Callable[[], Shape]] = {
    "jsonl": lambda: row,
    "chat": lambda: example,
    "mooncake": lambda: Trace().line,
    "guidellm": lambda: dataset_row,
}


class LinesWriter:
    """Writes one JSON object in each line of an open file."""

    def __init__(self, file: IO[bytes], shape: Shape) -> None:
        self.left_out: Counter[str] = Counter()
        self._file = file
        self._shape = shape

    def write(self, records: Sequence[PayloadRecord]) -> int:
        """Writes the records that have the shape; returns their number."""
        shaped = [self._shape(record) for record in records]
        lines = [to_json(values) + b"\n" for values in shaped if not isinstance(values, str)]
        self.left_out.update(reason for reason in shaped if isinstance(reason, str))
        self._file.writelines(lines)
        return len(lines)

    def __enter__(self) -> LinesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.flush()
