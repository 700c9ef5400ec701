"""How a process has ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """For messages, behind a process's name; `status` is that of `subprocess`: of a signal, its negative number."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
