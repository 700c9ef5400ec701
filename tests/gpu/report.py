"""What one part of the check has found. Each change is on the disk at once: a part that is killed loses nothing."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any


class Report:
    """A JSON file.

    `figures`: numbers and texts by name. `promises`: by name, how many of how many hold, and whether the check fails
    where not all do; the others are measured only. `notes`: what could not be measured, and why, and every warning that
    the engine logs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.note(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("headrace_predictor").addHandler(handler)
        self.contents: dict[str, Any] = {"figures": {}, "promises": {}, "notes": []}
        self._write()

    def figure(self, name: str, value: float | str) -> None:
        self.contents["figures"][name] = round(value, 3) if isinstance(value, float) else value
        self._write()

    def promise(self, name: str, holds: int, of: int, *, binds: bool = True) -> None:
        self.contents["promises"][name] = {"holds": holds, "of": of, "binds": binds}
        self._write()

    def note(self, text: str) -> None:
        if text not in self.contents["notes"]:
            self.contents["notes"].append(text)
            self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.contents, indent=1) + "\n")


def part_options(*own: str) -> argparse.Namespace:
    """The arguments of a part: its own ones, then device and file of the report."""
    parser = argparse.ArgumentParser()
    for name in (*own, "device"):
        parser.add_argument(name)
    parser.add_argument("report", type=Path)
    return parser.parse_args()
