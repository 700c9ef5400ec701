"""A process's limit of open files and sockets, of which each caller's connection takes one, its parent, and its end.

`python -I -S processes.py PARENT_PID COMMAND…` runs a command that dies with its parent: a killed one cannot stop its
children. `exec` keeps the process id, so the command itself is the supervisor's child.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable

_WANTED = 65_536
_FEW = 1024
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def raise_descriptor_limit(say: Callable[[str], object]) -> int:
    """Raises the limit of this process and its children as far as is allowed; returns it, and says if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft < _FEW:
        say(
            f"only {soft} open files and connections are allowed: with more callers, some are not accepted; "
            f"set the hard limit to {_WANTED} (ulimit -Hn; systemd: LimitNOFILE; a container: ulimits, nofile)"
        )
    return soft


def how_it_ended(status: int) -> str:
    """For messages, behind a process's name; `status` is that of `subprocess`: of a signal, its negative number."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"


def end_with_parent(parent: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Has the kernel send this process a signal when its parent is gone, which it must not outlive; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # It died before this process had registered with the kernel.
        os._exit(os.EX_UNAVAILABLE)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
