"""`headrace pull` and `headrace models`: the models in this machine's caches, and how fast it can run them.

A token of a stream reads all weights once, so the bandwidth of the memory by the bytes of the weights bounds the tokens
of one stream in a second; a mixture of experts, which reads a part of them, can be faster.
"""

import ctypes
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StartupError
from headrace.models.downloads import LISTING, MODEL_FILES, cache_folder
from headrace.models.hub import fetch
from headrace.models.sources import ModelSource, parse_location
from headrace.models.weight_headers import weight_bytes
from headrace_runner.settings import HOME
from headrace_runner.terminal import BOLD, Painter, printable, table

RUNTIME_BYTES = 1_000_000_000  # Of torch and the process, as .env.example has it.
_PROBE_BYTES = 512 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class CachedModel:
    """A model whose files are here: its location, the bytes on the disk and of the weights, the weights' formats."""

    location: str
    size: int
    weights: int
    formats: str


def pull(location: str) -> Path:
    """The folder of a model that is fetched now, with its progress on standard error; raises StartupError."""
    is_terminal = sys.stderr.isatty()

    def report(text: str) -> None:
        sys.stderr.write(f"\r\033[K{location}: {text}" if is_terminal else f"{location}: {text}\n")
        sys.stderr.flush()

    log = logging.getLogger("headrace")
    level = log.level
    log.setLevel(logging.CRITICAL)  # It reports the same.
    try:
        return fetch(parse_location(location, location), MODEL_FILES, report)
    except ValueError as error:
        raise StartupError(str(error)) from None
    except ImportError as error:
        raise StartupError(f"{location} needs the package {error.name}: `pip install headrace` has it") from None
    finally:
        log.setLevel(level)
        if is_terminal:
            sys.stderr.write("\n")


def cached_models() -> list[CachedModel]:
    """Those of buckets and registries, and of the hub's cache if its client is installed; reads headers of weights."""
    return sorted((_read(location, folder) for location, folder in _folders()), key=lambda model: model.location)


def weights_here(source: ModelSource) -> int:
    """The bytes of a model's weights; 0 for a model that is not on this machine yet."""
    path = HOME / source.location
    if path.is_file():
        return path.stat().st_size
    found = ((where, folder) for where, folder in _folders() if where.partition("@")[0] == source.location)
    return max((_read(*each).weights for each in ((source.location, path), *found)), default=0)


def as_table(models: Sequence[CachedModel], bytes_per_s: float, paint: Painter) -> str:
    """A line for each model under a line of titles."""
    if not models:
        return f"no models in {cache_folder()} and the hub's cache; `headrace pull LOCATION` fetches one"
    rows = [
        (
            printable(model.location),
            _gigabytes(model.size),
            model.formats or "-",
            _gigabytes(model.weights + RUNTIME_BYTES) if model.weights else "-",
            f"{bytes_per_s / model.weights:,.0f}" if model.weights else "-",
        )
        for model in models
    ]
    first, *lines = table(("model", "size", "weights", "memory", "tokens/s"), rows, ("model", "weights"))
    return "\n".join([paint(BOLD, first), *lines, f"memory bandwidth {_gigabytes(bytes_per_s)}/s, all cores together"])


def memory_bandwidth() -> float:
    """Bytes that all cores together read in a second, the best of three rounds; takes a second and 512 MiB."""
    search = ctypes.CDLL(None).memchr  # Without the interpreter's lock, and as fast as memory is.
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    cores = len(os.sched_getaffinity(0))
    size = _PROBE_BYTES // cores
    blocks = [ctypes.create_string_buffer(size) for _ in range(cores)]
    best = 0.0
    with ThreadPoolExecutor(cores) as threads:
        # Memory that was never written is one page of zeros.
        list(threads.map(lambda block: ctypes.memset(block, 1, size), blocks))
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            list(threads.map(lambda block: search(ctypes.addressof(block), 2, size), blocks))
            best = max(best, size * cores / (time.perf_counter() - begin))
    return best


def _folders() -> Iterator[tuple[str, Path]]:
    for path in cache_folder().glob(f"*/{LISTING}"):
        try:
            listing = json.loads(path.read_text())
            location, folder = str(listing["location"]), path.parent / str(listing["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield location, folder
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return
    for path in Path(HF_HUB_CACHE).glob("models--*/snapshots/*"):
        yield f"{path.parts[-3].removeprefix('models--').replace('--', '/')}@{path.name[:12]}", path


def _read(location: str, folder: Path) -> CachedModel:
    files = [path for path in folder.rglob("*") if path.is_file()]
    try:
        sizes = weight_bytes(folder)
    except (OSError, ValueError, KeyError, TypeError):
        sizes = Counter()  # Damaged: the predictor refuses it by name.
    formats = [name for name, _ in sizes.most_common(2)]
    return CachedModel(location, sum(path.stat().st_size for path in files), sizes.total(), ",".join(formats))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
