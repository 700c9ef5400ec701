"""`python -m runner up`: the stack in the foreground until Ctrl-C or SIGTERM. `down`: stops a running one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from millrace.errors import StartupError
from runner import settings as stack_settings
from runner.run_folder import RunFolder
from runner.stack import Stack

_DOWN_TIMEOUT_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m runner", description=__doc__)
    parser.add_argument("action", choices=("up", "down"))
    action = parser.parse_args().action
    try:
        settings = stack_settings.load()
        if action == "up":
            asyncio.run(up(Stack(settings, say=_say)))
        else:
            down(RunFolder(settings.run_folder))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


async def up(stack: Stack) -> None:
    """Runs a stack until a signal; StartupError if it cannot run."""
    started = time.monotonic()
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, asked_to_stop.set)

    await stack.start()
    serving = asyncio.create_task(_serve(stack, started), name="serve")
    stopping = asyncio.create_task(asked_to_stop.wait(), name="wait for a signal")
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        _say("stopping")
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
        await stack.stop()


async def _serve(stack: Stack, started: float) -> None:
    _say(f"starting; logs are in {_short(stack.folder.logs)}")
    await stack.wait_ready()
    for name, address in stack.addresses.items():
        _say(f"{name:<12} {address}")
    _say(f"{'playground':<12} http://{stack.gateway}/")
    _say(f"ready in {time.monotonic() - started:.1f} s. Try:")
    request = json.dumps({"model": stack.settings.first_model, "prompt": "Once upon a time"})
    method = "millrace.v1.TextGeneration/Generate"
    _say(f"  grpcurl -plaintext -d '{request}' {stack.gateway} {method}")
    _say(f"  buf curl --protocol grpc --http2-prior-knowledge -d '{request}' http://{stack.gateway}/{method}")
    await stack.ended()


def down(folder: RunFolder) -> None:
    """Stops the runner that holds the folder and waits for its end."""
    runner = folder.holder()
    if runner is None:
        _say("no stack is running")
        return
    if not _is_runner(runner):
        raise StartupError(
            f"process {runner}, which holds {folder.path}, is not `python -m runner up`; stop it yourself"
        )
    os.kill(runner, signal.SIGTERM)
    give_up_at = time.monotonic() + _DOWN_TIMEOUT_S
    while folder.holder() == runner:
        if time.monotonic() > give_up_at:
            raise StartupError(f"process {runner} is still running after {_DOWN_TIMEOUT_S:g} s")
        time.sleep(0.1)
    _say("stopped")


def _is_runner(pid: int) -> bool:
    """Whether a process is a runner, as far as the system tells."""
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or b"runner\0up" in command.read_bytes()


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
