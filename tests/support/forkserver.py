"""Services of a stack as forks of processes that have imported torch and transformers once: see zygote.py.

Starting a predictor takes seconds of a core, nearly all of them for imports, and the system tests start hundreds. A
fork runs the same `__main__` with the same environment; its pid, signals and exit code are its own. For each kind of
service there are at most two such processes, one for each set of variables that libraries read when they are imported
or the allocator when a process begins; a service with a third set is started as users start it. The workers of a run
share them: the first that needs one starts it, under a name that all of them can compute.
"""

import array
import asyncio
import errno
import hashlib
import os
import pickle
import re
import socket
import subprocess
import sys
from asyncio.subprocess import Process as Running
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from headrace_runner import process
from tests.support.zygote import MAX_REQUEST

# The modules that each service imports after its settings, see zygote.py; predictors of tests and benchmarks, modules
# whose names end with that word, import the same.
IMPORTS = {
    "logger": ("headrace_logger.__main__", "headrace_logger.servicer"),
    "transformer": ("headrace_transformer.__main__", "headrace_transformer.transformer"),
    "predictor": (
        "headrace_predictor.__main__",
        "headrace_predictor.engine_process.host:import_libraries",
        "headrace_predictor.repository.repository",
        "headrace_predictor.servicer",
        "tests.support.compile_once:install",
        "tests.support.forked_host:install",
    ),
    "_service": ("headrace.oip.stream_infer", "headrace.rpc.server.service", "headrace.rpc.server.server"),
}
_READ_EARLY = re.compile(
    r"(PYTHON|HF_|HUGGINGFACE_|TRANSFORMERS_|TORCH|PYTORCH_|CUDA_|NUMBA_|OMP_|MKL_|MALLOC_|GLIBC_|LD_|GRPC_(?!PROXY)|OTEL_PYTHON)"
)
_OF_THE_RUN = ("_service",)  # Kinds that are started with the variables of the run in any case.
_MOST_OF_A_KIND = 2  # Sets of variables for each kind of service.
# The process that outlives all workers of a run, with which the zygotes end: pytest's own, or xdist's controller.
_RUN = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
_known: dict[str, set[str]] = {}  # The zygotes' addresses, by kind.
_started: list[subprocess.Popen[bytes]] = []  # Started by this worker.


def address_of(kind: str, environment: Mapping[str, str]) -> str:
    """The abstract socket address of the process that forks services of this kind in this run."""
    early = sorted((name, value) for name, value in environment.items() if _READ_EARLY.match(name))
    return f"\0headrace-tests-{_RUN}-{kind}-{hashlib.sha256(repr(early).encode()).hexdigest()[:16]}"


def start_zygote(kind: str, address: str, environment: Mapping[str, str]) -> None:
    """Starts the zygote, unless another worker has just started it."""
    # Only the zygote keeps the listener: connecting fails once that has ended.
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen(64)
        command = (sys.executable, "-m", "tests.support.zygote", str(_RUN), str(listener.fileno()), *IMPORTS[kind])
        _started.append(
            subprocess.Popen(
                command,
                env=dict(environment),
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # An interrupt of one worker must not end another's services.
            )
        )


def ask(
    address: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, streams: Sequence[int]
) -> socket.socket:
    """Asks for a fork that runs a module, the first of `arguments`, with these standard streams.

    The socket gets the process id. Raises OSError if no zygote listens there.
    """
    request = pickle.dumps((arguments, dict(environment), str(folder)))
    if len(request) > MAX_REQUEST:
        raise ValueError("the environment is too large")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)  # This does not block: the kernel queues connections that are not accepted yet.
    except OSError:
        connection.close()
        raise
    connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
    return connection


async def fork(
    address: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, log: IO[bytes]
) -> "Fork":
    """Runs a module, the first of `arguments`; raises OSError if no zygote listens there, or it has ended."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        connection = ask(address, arguments, environment, folder, (nothing, log.fileno(), log.fileno()))
    finally:
        os.close(nothing)
    connection.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    pid = await reader.readline()
    if not pid:
        writer.close()
        raise OSError("the process that forks services has ended")
    return Fork(int(pid), reader, writer)


class Fork:
    """Replaces `asyncio.subprocess.Process` for its users here: `pid`, `returncode`, `wait`, `send_signal`."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._writer = writer
        self._ended = asyncio.create_task(self._end(reader), name=f"end of {pid}")

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    async def _end(self, reader: asyncio.StreamReader) -> int:
        try:
            self.returncode = int(await reader.readline())
            return self.returncode
        finally:
            self._writer.close()


async def spawn(command: tuple[str, ...], environment: Mapping[str, str], folder: Path, log: IO[bytes]) -> Running:
    """Forks the service if it can, else starts it as `headrace_runner.process.spawn` does."""
    arguments = command[2:] if command[:2] == (sys.executable, "-m") else ("",)
    kind = next((kind for kind in IMPORTS if arguments[0].endswith(kind)), None)
    if kind is not None:
        early = os.environ if kind in _OF_THE_RUN else environment
        address, known = address_of(kind, early), _known.setdefault(kind, set())
        if address in known or len(known) < _MOST_OF_A_KIND:
            known.add(address)
            with suppress(ConnectionRefusedError):
                return await fork(address, arguments, environment, folder, log)
            start_zygote(kind, address, early)
            return await fork(address, arguments, environment, folder, log)
    return await _spawn(command, environment, folder, log)


def fork_engine_host(control: socket.socket) -> int:
    """Forks a host of engine processes, as a predictor starts one, that serves a control socket; returns its id."""
    # The check of a GPU imports this module where Envoy is not installed.
    from headrace_runner.services import predictor_tuning
    from tests.support.free_ports import free_settings

    # As in a stack: the hosts are forks of the process of which its predictors are.
    environment = predictor_tuning(free_settings(Path.cwd())) | os.environ
    address = address_of("predictor", environment)
    asked = partial(ask, address, ("tests.support.forked_host",), environment, Path.cwd(), (control.fileno(), 1, 2))
    try:
        connection = asked()
    except ConnectionRefusedError:
        start_zygote("predictor", address, environment)
        connection = asked()
    with connection.makefile() as answer:
        pid = int(answer.readline())
    connection.detach()  # It stays open as long as this worker lives, with which the host ends.
    return pid


_spawn = process.spawn
