"""`python headrace_runner/install.py TITLE ARGUMENTS…`: `pip install ARGUMENTS…` with one line of progress.

On a terminal the line is updated in place; otherwise it is printed every ten seconds. The output of pip is shown only
if pip fails. Needs only Python itself, because it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

_TICK_S = 0.5
_LINE_EVERY_S = 10.0
_SHOWN_LINES = 30  # Of pip's output, if it fails.
_UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_FOUND = re.compile(r"\s*(Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+) (bytes|kB|MB|GB)\))?")
_INSTALLING = "Installing collected packages: "


class Progress:
    """The progress of pip, from its output."""

    def __init__(self, installed: Callable[[], int]) -> None:
        """`installed` returns the current number of packages in the environment."""
        self._installed = installed
        self._before = installed()
        self._found = 0
        self._wanted = 0
        self._megabytes = 0.0
        self._latest = ""

    def read(self, line: str) -> None:
        """Parses one line of pip's output."""
        if found := _FOUND.match(line):
            source, size, unit = PurePath(found[2]), found[3], found[4]
            if found[1] == "Processing" and not str(source).endswith(".whl"):
                return
            self._found += 1
            megabytes = float(size) * _UNITS[unit] if size else _megabytes(Path(source))
            self._megabytes += megabytes
            self._latest = f"{source.name.split('-')[0]} ({megabytes:.1f} MB)"
        elif line.startswith(_INSTALLING):
            self._wanted = line.count(",") + 1

    def __str__(self) -> str:
        if self._wanted:
            done = min(max(self._installed() - self._before, 0), self._wanted)
            return f"{done} of {_packages(self._wanted)} installed"
        if self._found:
            return f"{_packages(self._found)} found, {self._megabytes:.0f} MB; {self._latest}"
        return "reading the package index"

    def result(self) -> str:
        """A summary, after pip has ended."""
        if not self._wanted:
            return "up to date"
        return f"{_packages(self._wanted)}, {self._megabytes:.0f} MB"


def install(title: str, arguments: Iterable[str]) -> int:
    """Runs pip and shows its progress; returns pip's exit code."""
    started = time.monotonic()
    progress = Progress(_count_installed)
    output: deque[str] = deque(maxlen=_SHOWN_LINES)
    # Python compiles what it imports, which is less than everything, and keeps it.
    options = ("--no-compile", "--no-color", "--progress-bar", "off")
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        reading = threading.Thread(target=_read, args=(pip.stdout, progress, output), name="pip's output")
        reading.start()
        _show(title, progress, started, reading)
        code = pip.wait()
    # pip reports a conflict of two packages as an error, although it succeeds.
    sys.stderr.write("".join(line for line in output if code or line.startswith("ERROR:")))
    if not code:
        _print(f"{title}: {progress.result()} in {time.monotonic() - started:.0f} s\n")
    return code


def _read(lines: Iterable[str], progress: Progress, output: deque[str]) -> None:
    for line in lines:
        output.append(line)
        progress.read(line)


def _show(title: str, progress: Progress, started: float, reading: threading.Thread) -> None:
    """Prints the progress until pip's output ends."""
    in_place = sys.stdout.isatty()
    print_at = started + _LINE_EVERY_S
    while reading.is_alive():
        line = f"{title}: {progress}, {time.monotonic() - started:.0f} s"
        if in_place:
            _print(line[: _columns() - 1])
        elif time.monotonic() >= print_at:
            print_at += _LINE_EVERY_S
            _print(f"{line}\n")
        reading.join(_TICK_S)
    if in_place:
        _print("")


def _print(text: str) -> None:
    """On a terminal, replaces the previous line."""
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, end="", flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80


def _count_installed() -> int:
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def _packages(number: int) -> str:
    return "1 package" if number == 1 else f"{number} packages"


def _megabytes(path: Path) -> float:
    try:
        return path.stat().st_size / 1e6
    except OSError:
        return 0.0


if __name__ == "__main__":
    try:
        raise SystemExit(install(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
