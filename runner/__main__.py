"""`python -m runner up`: the stack in the foreground until Ctrl-C or SIGTERM. `down`: stops a running one.

SIGHUP, or `reload`, has a new Envoy take over with what envoy/ says then, at the cost of no call; the outcome is one
line of the runner's. A terminal that goes away sends SIGHUP too: then the stack stops. `roll` replaces every process at
the cost of no call: see stack.py and roll.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from millrace.errors import StartupError
from runner import roll
from runner import settings as stack_settings
from runner.report import Report
from runner.run_folder import RunFolder
from runner.stack import Stack
from runner.terminal import has_colours

_DOWN_TIMEOUT_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runner", description=__doc__)
    parser.add_argument("action", choices=("up", "down", "reload", "roll"))
    parser.add_argument("-v", "--verbose", action="store_true", help="up: print every address and a call by gRPC")
    arguments = parser.parse_args()
    action = arguments.action
    try:
        settings = stack_settings.load()
        if action == "up":
            asyncio.run(up(Stack(settings, say=_say), verbose=arguments.verbose))
        elif action == "down":
            down(RunFolder(settings.run_folder))
        elif action == "reload":
            reload(RunFolder(settings.run_folder))
        else:
            roll.request(folder := RunFolder(settings.run_folder), _running(folder))
            _say("every process has been replaced")
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


async def up(stack: Stack, *, verbose: bool = False) -> None:
    """Runs a stack until a signal; StartupError if it cannot run."""
    report = Report(stack, _say, coloured=has_colours(sys.stdout, os.environ), verbose=verbose)
    asked_to_stop, asked_to_reload, asked_to_roll = asyncio.Event(), asyncio.Event(), asyncio.Event()
    had_terminal = _has_terminal()

    def hang_up() -> None:
        terminal_is_gone = had_terminal and not _has_terminal()
        (asked_to_stop if terminal_is_gone else asked_to_reload).set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, asked_to_stop.set)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    loop.add_signal_handler(roll.SIGNAL, asked_to_roll.set)

    await stack.start()
    serving = asyncio.create_task(_serve(stack, report), name="serve")
    reloading = asyncio.create_task(_reload_when_asked(stack, asked_to_reload), name="reload")
    rolling = asyncio.create_task(roll.roll_when_asked(stack, asked_to_roll, _say), name="roll")
    stopping = asyncio.create_task(asked_to_stop.wait(), name="wait for a signal")
    tasks = (serving, reloading, rolling, stopping)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            await task
        _say("stopping")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stack.stop()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _serve(stack: Stack, report: Report) -> None:
    report.starting()
    await stack.wait_ready(on_ready=report.ready)
    report.all_ready()
    await stack.ended()


async def _reload_when_asked(stack: Stack, asked: asyncio.Event) -> None:
    """Reloads the gateway at each request, for ever; those that come during a reload are one more."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            await stack.reload()
        except (StartupError, OSError) as error:
            _say(f"not reloaded: {error}")
        else:
            _say("reloaded: a new Envoy takes the calls, the one before ends those that it has")


def reload(folder: RunFolder) -> None:
    """Asks the runner that holds the folder for a reload."""
    runner = _running(folder)
    os.kill(runner, signal.SIGHUP)
    _say(f"asked process {runner}, which says what becomes of it")


def down(folder: RunFolder) -> None:
    """Stops the runner that holds the folder and waits for its end."""
    runner = _runner(folder)
    if runner is None:
        _say("no stack is running")
        return
    os.kill(runner, signal.SIGTERM)
    give_up_at = time.monotonic() + _DOWN_TIMEOUT_S
    while folder.holder() == runner:
        if time.monotonic() > give_up_at:
            raise StartupError(f"process {runner} is still running after {_DOWN_TIMEOUT_S:g} s")
        time.sleep(0.1)
    _say("stopped")


def _running(folder: RunFolder) -> int:
    """The runner that holds the folder; StartupError where none does."""
    runner = _runner(folder)
    if runner is None:
        raise StartupError("no stack is running")
    return runner


def _runner(folder: RunFolder) -> int | None:
    """The runner that holds the folder; StartupError where it is another kind of process."""
    holder = folder.holder()
    if holder is not None and not _is_runner(holder):
        raise StartupError(
            f"process {holder}, which holds {folder.path}, is not `python -m runner up`; stop it yourself"
        )
    return holder


def _is_runner(pid: int) -> bool:
    """Whether a process is a runner, as far as the system tells."""
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or b"runner\0up" in command.read_bytes()


def _say(line: str) -> None:
    with suppress(OSError):  # The terminal may be gone.
        print(line, flush=True)


if __name__ == "__main__":
    main()
