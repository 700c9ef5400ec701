"""The processor time of processes, their descendants and their threads, from /proc.

A process is named by its role: that of its parent and, if its command differs from the parent's, the last part of that
command's module or file; else "fork". Threads have the kernel's names: `NAMED_THREADS` in a service's environment makes
these the names in Python. Threads of one process and name are counted together. `ended` is the processor time that a
process used in threads that have ended.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

# The `environment` of a service, in which a main thread keeps the name of its command.
NAMED_THREADS = {"PYTHONPATH": str(Path(__file__).resolve().parent / "thread_names")}

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_MAIN = "main"
_ENDED = "ended"

K = TypeVar("K")


class Thread(NamedTuple):
    """The role of a process, and the name of one of its threads."""

    role: str
    name: str


class Usage(NamedTuple):
    """Seconds of processor time since the start. A process's time includes that of threads which have ended."""

    processes: dict[str, float]
    threads: dict[Thread, float]

    def since(self, before: "Usage") -> "Usage":
        return Usage(_difference(before.processes, self.processes), _difference(before.threads, self.threads))


class _Stat(NamedTuple):
    name: str
    parent: int
    seconds: float


def roles(roots: Mapping[str, int]) -> dict[int, str]:
    """The role of each process id: the roots by their names, and all their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _numbers(Path("/proc")):
        with suppress(OSError):
            children[_stat(Path(f"/proc/{pid}/stat")).parent].append(pid)
    found: dict[int, str] = {}

    def add(pid: int, role: str) -> None:
        found[pid] = role
        for child in sorted(children[pid]):
            part = _command(child)
            add(child, f"{role}/{'fork' if part == _command(pid) else part}")

    for name, pid in roots.items():
        add(pid, name)
    return found


def usage(processes: Mapping[int, str]) -> Usage:
    """The processor time of processes; those that have ended are left out."""
    used = Usage(defaultdict(float), defaultdict(float))
    for pid, role in processes.items():
        with suppress(OSError):
            seconds = _stat(Path(f"/proc/{pid}/stat")).seconds
            used.processes[role] += seconds
            for thread in _numbers(Path(f"/proc/{pid}/task")):
                with suppress(OSError):
                    folder = Path(f"/proc/{pid}/task/{thread}")
                    name = _MAIN if thread == pid else _stat(folder / "stat").name
                    own = int((folder / "schedstat").read_text().split()[0]) / 1e9
                    used.threads[Thread(role, name)] += own
                    seconds -= own
            used.threads[Thread(role, _ENDED)] += seconds
    return used


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This thread's cores, and those of the processes and threads that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _difference(before: Mapping[K, float], after: Mapping[K, float]) -> dict[K, float]:
    return {key: max(0.0, seconds - before.get(key, 0.0)) for key, seconds in after.items()}


def _numbers(folder: Path) -> Iterator[int]:
    return (int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())


def _stat(path: Path) -> _Stat:
    head, _, rest = path.read_text().rpartition(")")
    fields = rest.split()
    return _Stat(head.partition("(")[2], int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND)


def _command(pid: int) -> str:
    """The last part of the module or file that a process runs; empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0]).name
