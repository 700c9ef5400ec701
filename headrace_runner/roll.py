"""`make roll`: sends a request to a running stack, which replaces its services, and waits for its outcome.

The caller writes `roll.json` to the stack's folder, readable only by its user: an id, and the settings in the caller's
environment, which may be secrets. At SIGUSR1 the runner takes the file, rolls, and writes `roll.outcome`: the id, and
the error if there was one. Settings that neither the request nor `.env` names stay unchanged, as do all settings if the
roll fails.
"""

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

from headrace.errors import StartupError
from headrace.files import replace_file
from headrace_runner import settings as stack_settings
from headrace_runner.run_folder import RunFolder
from headrace_runner.stack import Stack

SIGNAL = signal.SIGUSR1
_POLL_S = 0.2


def request(folder: RunFolder, runner: int) -> None:
    """Requests a roll from the runner that holds the folder, and waits; raises StartupError if the roll failed."""
    request_id = uuid.uuid4().hex
    request = {"id": request_id, "environment": stack_settings.own_environment()}
    try:
        _write(folder.roll_request, request)
    except OSError as error:
        raise folder.unusable(error) from None
    os.kill(runner, SIGNAL)
    while (outcome := _read(folder.roll_outcome)).get("id") != request_id:
        if folder.holder() != runner:
            raise StartupError(f"process {runner} ended before all was replaced")
        time.sleep(_POLL_S)
    if outcome["error"]:
        raise StartupError(f"not rolled: {outcome['error']}")


async def roll_on_request(stack: Stack, request: asyncio.Event, say: Callable[[str], None]) -> None:
    """Rolls the stack at each request, for ever."""
    while True:
        await request.wait()
        request.clear()
        document = _read(stack.folder.roll_request)
        stack.folder.roll_request.unlink(missing_ok=True)
        error = ""
        started = time.monotonic()
        try:
            with _environment(document.get("environment", {})):
                await stack.roll(stack_settings.load())
        except (StartupError, OSError) as reason:
            error = str(reason)
            say(f"not rolled: {error}")
        else:
            say(
                f"rolled in {time.monotonic() - started:.1f} s: every service was replaced and has the current settings"
            )
        with suppress(OSError):
            _write(stack.folder.roll_outcome, {"id": document.get("id", ""), "error": error})


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Extends this process's environment, also for later restarts and rolls unless the block fails."""
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


def _write(path: Path, document: object) -> None:
    replace_file(path, json.dumps(document), mode=0o600)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
