"""`python -m headrace_runner up`: runs the stack in the foreground until Ctrl-C, SIGTERM or the end of its terminal.
`down`: stops a running one. `roll`: replaces its services without losing a call; see stack.py and roll.py.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # The imports take a second: Ctrl-C ends them without a traceback.

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from headrace.errors import StartupError
from headrace.processes import raise_descriptor_limit
from headrace_runner import roll
from headrace_runner import settings as stack_settings
from headrace_runner.process import Say
from headrace_runner.run_folder import RunFolder
from headrace_runner.settings import IS_CHECKOUT
from headrace_runner.stack import Stack
from headrace_runner.terminal import BOLD, GREEN, Painter, has_colours, short

_DOWN_TIMEOUT_S = 15.0
_METHOD = "headrace.v1.TextGeneration/Generate"
# Settings of `make up` that `make smoke` also needs.
_GATEWAY_SETTINGS = ("GATEWAY_BIND", "GATEWAY_PORT", "PORT_OFFSET")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace_runner", description=__doc__)
    parser.add_argument("action", choices=("up", "down", "roll"))
    parser.add_argument("-v", "--verbose", action="store_true", help="up: print every address and a call by gRPC")
    arguments = parser.parse_args()
    action = arguments.action
    try:
        settings = stack_settings.load()
        if action == "up":
            raise_descriptor_limit(_say)
            asyncio.run(up(Stack(settings, say=_say), verbose=arguments.verbose))
        elif action == "down":
            down(RunFolder(settings.run_folder))
        else:
            folder = RunFolder(settings.run_folder)
            if (runner := _runner(folder)) is None:
                raise StartupError("no stack is running")
            roll.request(folder, runner)
            _say("every service has been replaced")
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None


class Report:
    """Prints the start of one stack: a line for each process that becomes ready, and four lines with next steps.

    `verbose` adds every address, the pages of the metrics, and a call by gRPC. Colours are for terminals only.
    """

    def __init__(self, stack: Stack, say: Say, *, coloured: bool = False, verbose: bool = False) -> None:
        self._stack = stack
        self._say = say
        self._paint = Painter(coloured)
        self._verbose = verbose
        self._started = time.monotonic()

    def ready(self, name: str) -> None:
        name = "gateway" if name == "envoy" else name
        seconds = f"{self._seconds():5.1f} s"
        self._say(f"{self._label(name)} {self._stack.addresses[name]:<21} {self._paint(GREEN, seconds)}")

    def all_ready(self) -> None:
        """Reports the whole stack as ready, in one write: other programs may wait for one of the lines."""
        if self._verbose:
            for name, value in self._details():
                self._say(f"{self._label(name)} {value}")
        lines = [f"{self._label(name)} {value}" for name, value in self._next_steps()]
        self._say("\n".join([self._paint(GREEN, f"ready in {self._seconds():.1f} s"), *lines]))

    def _details(self) -> list[tuple[str, str]]:
        stack = self._stack
        pages = [page for kind in stack.metrics_pages.values() for page in kind]
        request = json.dumps({"model": stack.settings.first_model, "prompt": "Once upon a time"})
        return [
            ("management", f"127.0.0.1:{stack.settings.management_port}"),
            ("inner", stack.addresses["inner"]),
            ("admin", f"127.0.0.1:{stack.settings.gateway_admin_port}"),
            *(("metrics", f"http://{host}:{port}{path}") for host, port, path in pages),
            ("grpc", f"grpcurl -plaintext -d '{request}' {stack.gateway} {_METHOD}"),
            ("", f"buf curl --protocol grpc --http2-prior-knowledge -d '{request}' http://{stack.gateway}/{_METHOD}"),
        ]

    def _next_steps(self) -> list[tuple[str, str]]:
        stack, settings = self._stack, self._stack.settings
        request = {"model": settings.first_model, "stream": True, "prompt": "Once upon a time"}
        key = " -H 'Authorization: Bearer KEY'" if settings.gateway_keys or settings.gateway_jwks else ""
        return [
            *([("with TLS", f"https://{settings.gateway_with_tls}/")] if settings.gateway_tls else []),
            ("playground", f"http://{stack.gateway}/"),
            ("call", f"curl -N http://{stack.gateway}/v1/completions{key} -d '{json.dumps(request)}'"),
            ("check", self._check()),
            ("logs", short(stack.folder.logs)),
        ]

    def _check(self) -> str:
        if not IS_CHECKOUT:
            return f"headrace smoke --gateway {self._stack.gateway}"
        return "make smoke" + "".join(f" {name}={os.environ[name]}" for name in _GATEWAY_SETTINGS if name in os.environ)

    def _label(self, name: str) -> str:
        return self._paint(BOLD, f"{name:<12}")

    def _seconds(self) -> float:
        return time.monotonic() - self._started


async def up(stack: Stack, *, verbose: bool = False) -> None:
    """Runs a stack until a signal; raises StartupError if it cannot run."""
    report = Report(stack, _say, coloured=has_colours(sys.stdout, os.environ), verbose=verbose)
    stop_request, roll_request = asyncio.Event(), asyncio.Event()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, stop_request.set)
    loop.add_signal_handler(roll.SIGNAL, roll_request.set)

    serving = asyncio.create_task(_serve(stack, report), name="serve")
    rolling = asyncio.create_task(roll.roll_on_request(stack, roll_request, _say), name="roll")
    stopping = asyncio.create_task(stop_request.wait(), name="wait for a signal")
    tasks = (serving, rolling, stopping)
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


async def _serve(stack: Stack, report: Report) -> None:
    await stack.start()
    await stack.wait_ready(on_ready=report.ready)
    report.all_ready()
    await stack.ended()


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


def _runner(folder: RunFolder) -> int | None:
    """The id of the runner that holds the folder, if any; raises StartupError if it is another kind of process."""
    holder = folder.holder()
    if holder is not None and not _is_runner(holder):
        raise StartupError(
            f"process {holder}, which holds {folder.path}, is not `python -m headrace_runner up`; stop it yourself"
        )
    return holder


def _is_runner(pid: int) -> bool:
    """Whether a process is a runner; assumed without /proc."""
    command = Path(f"/proc/{pid}/cmdline")
    return not command.exists() or b"runner\0up" in command.read_bytes()


def _say(line: str) -> None:
    with suppress(OSError):  # The terminal may be gone.
        print(line, flush=True)


if __name__ == "__main__":
    main()
