"""The host: imports the libraries of models once, and forks an engine process for each socket that it receives.

A fork shares the libraries' memory with the host and starts in a few hundredths of a second. The host stays
single-threaded and never touches the device: a process that has done so cannot be forked.

`python -m headrace_predictor.engine_process.host FD PARENT`: the control socket and the parent's process id. Each
message on the control socket is one byte with the file descriptor of an engine's socket. The host answers with lines:
`started PID`, and `ended PID STATUS` with the exit code or the negative signal when an engine process has ended. It
ends when the other end of the control socket closes.
"""

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, NoReturn

from headrace.processes import end_with_parent
from headrace.rpc.limits.byte_budget import give_memory_back

_MADV_DONTNEED = 4  # <asm-generic/mman-common.h>
_LEAST_BYTES = 1 << 20
_COMPILER, _TRANSFORMERS = "torch._dynamo", "transformers"
_UNUSED = ("torch.distributions", "torch.export", "torch.masked", "torch.quantization", "torch.utils.data")
_DEFERRED = (*_UNUSED, _TRANSFORMERS, "transformers.models")


def main(control: socket.socket, parent: int) -> NoReturn:
    _die_with(parent)
    import_libraries()
    from headrace_predictor.engine_process import worker

    give_memory_back()
    _unmap_idle_code()
    with suppress(ConnectionError):
        connection = _serve(control)
        if connection is not None:
            worker.run(connection)
    os._exit(os.EX_OK)


def import_libraries() -> None:
    """Imports what engine processes need, and runs a tiny model."""
    # Libraries ask for devices while they are imported; the driver itself must not be initialised here.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Nearly all that an import makes stays: collections would be a third of its time, and free 8 MB of 380.
    gc.disable()
    with light_imports():
        from headrace_predictor.engine_process import worker  # noqa: F401
        from headrace_predictor.engine_process.worker import rehearse

        rehearse()
    # Objects that no collection looks at stay shared with the forks.
    gc.freeze()
    gc.enable()


def _serve(control: socket.socket) -> socket.socket | None:
    """Forks until the control socket closes; returns an engine's socket in each fork."""
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    host = os.getpid()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    _report_ends(control)
                    continue
                data, fds, _, _ = socket.recv_fds(control, 1, 1)
                if not data:
                    return None
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    control.close()
                    for fd in (woken, wake):
                        os.close(fd)
                    _die_with(host)
                    return socket.socket(fileno=fds[0])
                os.close(fds[0])
                control.sendall(b"started %d\n" % pid)


def _report_ends(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        control.sendall(b"ended %d %d\n" % (pid, os.waitstatus_to_exitcode(status)))


def _die_with(parent: int) -> None:
    """Ends this process by SIGKILL when its parent's thread ends that has started it; on Linux only.

    SIGTERM and SIGINT, which a supervisor or a terminal sends to all processes of a group, are ignored: the parent
    drains first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)


def _unmap_idle_code() -> None:
    """Takes the code of libraries out of this process's memory, of which it executed much once, while it imported.

    The pages stay in the system's cache, from which this process and its forks map again what they execute. Only pages
    that are executable and cannot be written equal their file for certain. On Linux only.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if permissions == "r-xp" and name.startswith("/") and end - begin >= _LEAST_BYTES:
            madvise(begin, end - begin, _MADV_DONTNEED)


@contextmanager
def light_imports() -> Iterator[None]:
    """Imports torch and transformers without what an engine process never uses.

    That is torch's compiler, exporter and the like, its tensors on several machines, SciPy, and the names of all
    classes, which transformers reads twice from the files of all models. They were half of the processor's time
    of a host's start. For a process that compiles nothing by torch: what is decorated meanwhile says nothing to the
    compiler.
    """
    for name in _DEFERRED:
        if name not in sys.modules:
            _defer(name)
    patches: dict[str, Any] = {"is_torch_distributed_available": _never, "is_scipy_available": _never}
    patches["direct_transformers_import"] = lambda _: sys.modules[_TRANSFORMERS]  # It would import it again.
    for name in ("transformers.utils", "transformers.utils.import_utils"):
        vars(import_module(name)).update(patches)
    # The compiler's submodules can be imported, but not its own code, which imports all of them. Numba looks for SciPy.
    absent = {_COMPILER: _without_code(_COMPILER, lambda _: _unchanged), "scipy.linalg": None}
    absent = {name: module for name, module in absent.items() if name not in sys.modules}
    sys.modules |= absent
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _defer(name: str) -> None:
    """Puts off a module's own code until somebody takes a name of it; submodules can be imported without."""

    def attribute(own: str) -> Any:
        if PathFinder.find_spec(f"{name}.{own}", vars(module).get("__path__", ())):
            return import_module(f"{name}.{own}")
        del module.__getattr__
        module.__spec__.loader.exec_module(module)
        if (actual := sys.modules[name]) is not module:  # transformers' have put another in their place.
            module.__getattr__ = partial(getattr, actual)
        return getattr(actual, own)

    sys.modules[name] = module = _without_code(name, attribute)


def _without_code(name: str, attribute: Callable[[str], Any]) -> Any:
    """A module whose own code has not run; `attribute` gives its attributes by name."""

    def named(own: str) -> Any:
        if own.startswith("__"):  # Which the import system looks for.
            raise AttributeError(own)
        return attribute(own)

    package, *inner = name.split(".")
    spec: Any = find_spec(package)  # That of a submodule would import the package.
    if inner:
        folders = [os.path.join(folder, *inner[:-1]) for folder in spec.submodule_search_locations]
        spec = PathFinder.find_spec(name, folders)
    module: Any = module_from_spec(spec)
    module.__getattr__ = named
    if name == _TRANSFORMERS:  # Its submodules read that.
        module.__version__ = version(name)
    return module


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return _unchanged if function is None else function


def _never() -> bool:
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
