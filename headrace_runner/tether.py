"""Runs a command that dies with its parent: `python -I -S tether.py PARENT_PID COMMAND…`.

A killed parent cannot stop its children; on Linux the kernel does, when the thread that started them ends. `exec` keeps
that setting and the process id, so the command itself is the supervisor's child. On other systems this is only `exec`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before the kernel had this registration.
            raise SystemExit(1)
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
