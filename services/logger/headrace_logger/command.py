"""What the logger's commands (export, backup, restore) share: the database and exit codes.

A command works on files and needs no running logger. Its result is one line on standard error, and so is each error.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from headrace.errors import StartupError
from headrace.validation import first_fault
from headrace_logger.settings import Location, LoggerSettings

_INTERRUPTED = 130  # A shell's exit code for SIGINT.


def run_command(name: str, work: Callable[[], str]) -> int:
    """Runs a command, and writes the description that it returns; returns the exit code: 0, 1 for an error, 130."""
    try:
        description = work()
    except StartupError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    except BrokenPipeError:
        _leave_stdout()  # The reader has closed the pipe.
        return 0
    except KeyboardInterrupt:
        _leave_stdout()
        sys.stderr.write(f"{name}: interrupted\n")
        return _INTERRUPTED
    sys.stderr.write("".join(f"{name}: {line}\n" for line in description.splitlines()))
    return 0


def database_of(named: Path | None) -> Location:
    """The database that the command line names, else that of the logger's settings; raises StartupError."""
    if named is not None:
        return named
    try:
        settings = LoggerSettings()
        return settings.database_url or settings.database
    except ValidationError as error:
        (name, *_), message = first_fault(error)
        raise StartupError(f"LOGGER_{str(name).upper()}: {message}; or name a file with --database") from None


def _leave_stdout() -> None:
    """Detaches stdout: Python's flush at exit would fail on a closed pipe, or hang on a reader that has stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
