"""A process that has imported a service's modules, and forks instead of importing them again: see forkserver.py.

`python -m tests.support.zygote RUN_PID SOCKET_FD IMPORT…`, an import being a module or the `module:function` that
imports. Each connection to the socket asks for one service: a pickled (arguments, environment, folder) with the file
descriptors of its standard streams. It gets the process id, and the exit code when the process has ended. A forked
service leads a session of its own and dies with its connection, so with a killed worker of the tests, and with this
process, as a started one dies with its supervisor (headrace/processes.py); this process ends with the run.
"""

import gc
import importlib
import os
import pickle
import random
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress

from headrace.processes import end_with_parent

MAX_REQUEST = 64 * 1024  # Less than a socket buffer, so that it arrives whole.


def main() -> None:
    run, listener, imports = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    try:
        run_fd = os.pidfd_open(run)  # Readable once that process has ended.
    except ProcessLookupError:
        return
    for each in imports:
        name, _, function = each.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    # Objects that no collection looks at stay shared with the forks.
    gc.collect()
    gc.freeze()
    arguments, environment = serve(socket.socket(fileno=listener), run_fd)
    os.environ.clear()
    os.environ.update(environment)
    reseed()
    sys.argv[:] = arguments
    sys.modules.pop(f"{arguments[0]}.__main__", None)  # Otherwise runpy warns.
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def serve(listener: socket.socket, run_fd: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Forks until the run ends; returns in each fork: the module to run and its arguments, and its environment."""
    waiting: dict[int, socket.socket] = {}  # By process id.
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        selector.register(run_fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == run_fd:
                    raise SystemExit(0)
                if key.fd == woken:
                    os.read(woken, 4096)
                    report_ends(waiting, selector)
                    continue
                if key.fileobj is not listener:
                    if key.data in waiting:  # Else it has just been reported.
                        os.kill(key.data, signal.SIGKILL)
                    continue
                connection = listener.accept()[0]
                data, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 8)
                if not data:  # The client has disconnected.
                    connection.close()
                    continue
                zygote, (arguments, environment, folder) = os.getpid(), pickle.loads(data)
                pid = os.fork()
                if not pid:
                    become(zygote, folder, fds)
                    for other in (listener, connection, *waiting.values()):
                        other.close()
                    for fd in (woken, wake, run_fd):
                        os.close(fd)
                    return arguments, environment
                for fd in fds:
                    os.close(fd)
                waiting[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                connection.sendall(b"%d\n" % pid)


def report_ends(waiting: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(waiting):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with waiting.pop(pid) as connection, suppress(OSError):  # A stopped stack does not wait for it.
                selector.unregister(connection)
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(zygote: int, folder: str, fds: list[int]) -> None:
    """Makes the fork equal to a started process."""
    os.setsid()
    end_with_parent(zygote, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    for fd in fds:
        os.close(fd)
    os.chdir(folder)


def reseed() -> None:
    """Seeds random generators: forks must not draw the same numbers. Modules that are not imported have no state."""
    random.seed()
    for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)()


if __name__ == "__main__":
    main()
