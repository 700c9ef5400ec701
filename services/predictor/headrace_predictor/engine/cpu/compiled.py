"""Numba's options and its cache of compiled kernels, both set before the first kernel is defined.

Numba's own cache of a kernel does not notice a change of the functions and numbers that it takes from elsewhere, so
each state of the code has a cache of its own, in NUMBA_CACHE_DIR or ~/.cache/headrace/kernels.
"""

from __future__ import annotations

from hashlib import sha256
from os.path import expanduser
from pathlib import Path

import torch
from numba.core import config

# Without Python's checks: callers construct the shapes, so no exception can occur. Without contraction or another order
# of sums, results are the same on every machine.
OPTIONS = {"nogil": True, "error_model": "numpy", "cache": True}


# Whether the system lets this process, and those that it forks, use the tiles of AMX.
HAS_TILES: bool = torch.cpu._init_amx()


def _digest() -> str:
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "state" / "cache.py"]
    return sha256(b"".join(path.read_bytes() for path in files) + bytes([HAS_TILES])).hexdigest()[:16]


CODE = _digest()
config.CACHE_DIR = str(Path(config.CACHE_DIR or expanduser("~/.cache/headrace/kernels")) / CODE)
