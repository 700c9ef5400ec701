"""Numba's options, threads and cache of compiled kernels, all set before the first kernel is defined.

OpenMP's threads are those of torch: its libgomp is in the process, and the symbols of Numba's layer are bound to it. So
they begin in 2 µs, where Numba's own threads take 100. They are in use if the system has a libgomp too, because Numba
asks for its file.

Numba's own cache of a kernel does not notice a change of the functions and numbers that it takes from elsewhere, so
each state of the code has a cache of its own, in NUMBA_CACHE_DIR or ~/.cache/headrace/kernels, or in TMPDIR where that
cannot be written. It is the same wherever that code lies: another environment, or another copy of the repository,
compiles nothing again.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from stat import S_ISDIR
from tempfile import gettempdir
from typing import Any

import numba
import torch
from numba.core import config
from numba.core.caching import UserProvidedCacheLocator

from headrace_predictor.engine.cpu.tiles import HAS_TILES

# Without Python's checks: callers construct the shapes, so no exception can occur. Without contraction or another order
# of sums, results are the same on every machine.
config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
_POOL = threading.Lock()  # Numba's own threads serve one caller at a time.
OPTIONS = {"nogil": True, "error_model": "numpy", "cache": True}


def run_in_parallel(kernel: Callable[..., None], threads: int, *arguments: Any, alone: bool = False) -> None:
    """Runs a parallel kernel with `threads` threads, see `kernel_threads`, or on the caller's `alone`."""
    with _POOL:
        own = torch.get_num_threads()
        numba.set_num_threads(1 if alone else min(threads, config.NUMBA_NUM_THREADS))
        if torch.get_num_threads() != own:  # The first call sets those of OpenMP to all that there are.
            torch.set_num_threads(own)
        kernel(*arguments)


def _digest() -> str:
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "state" / "cache.py"]
    code = b"".join(path.read_bytes() for path in files)
    return sha256(numba.__version__.encode() + code + bytes([HAS_TILES])).hexdigest()[:16]


CODE = _digest()


class Locator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Numba's own has a folder for each path of the code."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._cache_path = config.CACHE_DIR

    def get_source_stamp(self) -> str:
        return CODE


def _folder() -> Path:
    own = Path(gettempdir()) / f"headrace-kernels-{os.getuid()}"
    for folder in (Path(config.CACHE_DIR or expanduser("~/.cache/headrace/kernels")), own):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and (folder != own or _is_private(folder)):
                return folder
    raise OSError("compiled kernels can be kept neither in NUMBA_CACHE_DIR nor in TMPDIR")


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put files there, which Numba would execute."""
    info = folder.lstat()
    return S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


config.CACHE_DIR = str(_folder() / CODE)
config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
