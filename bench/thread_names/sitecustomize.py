"""Gives threads their Python names in the kernel too, so that /proc shows them; imported by every Python process whose
PYTHONPATH has this folder, also by the children of services.
"""

import threading
from contextlib import suppress

_start = threading.Thread.start


def _start_named(thread: threading.Thread) -> None:
    _start(thread)
    # The thread may have ended.
    with suppress(OSError), open(f"/proc/self/task/{thread.native_id}/comm", "w") as name:
        name.write(thread.name[:15])


threading.Thread.start = _start_named  # type: ignore[method-assign]
