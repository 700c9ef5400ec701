"""`make roll`: the request to a running stack, and its outcome.

Whoever asks leaves `roll.json` in the stack's folder, readable for its user alone: an id, and the settings of its own
environment, for these may be secrets. The runner takes the file at SIGUSR1, rolls, and leaves `roll.outcome`: the id,
and the error where there was one. Settings that neither the request nor `.env` names stay as they were, and so do all
where the roll fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from millrace.errors import StartupError
from runner import settings as stack_settings
from runner.run_folder import RunFolder
from runner.stack import Stack

SIGNAL = signal.SIGUSR1
_POLL_S = 0.2


def request(folder: RunFolder, runner: int) -> None:
    """Asks the runner that holds the folder for a roll and waits for the outcome; StartupError where it failed."""
    request_id = uuid.uuid4().hex
    request = {"id": request_id, "environment": stack_settings.own_environment()}
    try:
        _write(_request_file(folder), request)
    except OSError as error:
        raise folder.unusable(error) from None
    os.kill(runner, SIGNAL)
    while (outcome := _read(_outcome_file(folder))).get("id") != request_id:
        if folder.holder() != runner:
            raise StartupError(f"process {runner} ended before all was replaced")
        time.sleep(_POLL_S)
    if outcome["error"]:
        raise StartupError(f"not rolled: {outcome['error']}")


async def roll_when_asked(stack: Stack, request: asyncio.Event, say: Callable[[str], None]) -> None:
    """Rolls the stack at each request, for ever."""
    while True:
        await request.wait()
        request.clear()
        wanted = _read(_request_file(stack.folder))
        _request_file(stack.folder).unlink(missing_ok=True)
        error = ""
        started = time.monotonic()
        try:
            with _environment(wanted.get("environment", {})):
                await stack.roll(stack_settings.load())
        except (StartupError, OSError) as reason:
            error = str(reason)
            say(f"not rolled: {error}")
        else:
            say(f"rolled in {time.monotonic() - started:.1f} s: every process is a new one, with the present settings")
        with suppress(OSError):
            _write(_outcome_file(stack.folder), {"id": wanted.get("id", ""), "error": error})


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Adds to this process's environment, for later restarts and rolls too unless the block fails."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        raise


def _request_file(folder: RunFolder) -> Path:
    return folder.path / "roll.json"


def _outcome_file(folder: RunFolder) -> Path:
    return folder.path / "roll.outcome"


def _write(path: Path, document: object) -> None:
    """Writes a file that is there as a whole or not at all, for its user's eyes only."""
    new = path.with_name(path.name + ".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(document, file)
    new.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
