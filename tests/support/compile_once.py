"""Of the processes of a run that need the same kernel one compiles it; the others wait, and read it from Numba's cache.

Workers that need the same kernels at once would compile each of them several times, which takes minutes of a core.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CompileOnce:
    """Replaces `Dispatcher.compile`: each kernel and signature has a lock, which is a file.

    A kernel's lock is held while those that it calls are compiled. No kernel calls itself, so no two processes can wait
    for each other.
    """

    def __init__(self, compile_: Callable[[Any, Any], Any], folder: Path) -> None:
        self._compile, self._folder = compile_, folder
        self._lock = threading.RLock()  # Taken before the files': a thread never waits for one of its own process.

    def __call__(self, dispatcher: Any, signature: Any) -> Any:
        code = dispatcher.py_func.__code__
        name = f"{code.co_filename} {code.co_firstlineno} {signature}"
        path = self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        with self._lock, path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                return self._compile(dispatcher, signature)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # A fork may have the file too.


def install() -> None:
    """From now on this process and its forks take part, where Numba is installed."""
    try:
        from numba.core.dispatcher import Dispatcher
    except ImportError:  # It is optional: a GPU needs none.
        return
    folder = Path(tempfile.gettempdir()) / "headrace-tests-kernels"
    folder.mkdir(exist_ok=True)
    compile_once = CompileOnce(Dispatcher.compile, folder)
    # A method: its first argument is the dispatcher.
    Dispatcher.compile = lambda *arguments: compile_once(*arguments)
