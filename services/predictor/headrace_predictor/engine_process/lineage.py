"""What ends a process with the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Ends this process by SIGKILL when its parent's thread ends that has started it; on Linux only.

    SIGTERM and SIGINT, which a supervisor or a terminal sends to all processes of a group, are ignored: the parent
    drains first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before the kernel had this registration.
        os._exit(os.EX_UNAVAILABLE)
