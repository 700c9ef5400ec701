"""Model files of buckets and registries, in a cache on the local disk: what all such places share.

A place is resolved to a `Listing`: its files, and a digest that changes with any of them. They lie in the folder
`…/headrace/models/PLACE/DIGEST`, below XDG_CACHE_HOME or ~/.cache. A file has its name once it is complete and checked;
until then it is `.NAME.part`, which a later start continues. Whoever has that file locked downloads it, in any
process; others wait for the lock, which ends with its process. Reads from the network are limited in time, so the wait
is too. While a place cannot be reached, the files that an earlier start found there are used.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from headrace.errors import StartupError, StartupFault

# What the services read of a model; each fetches some of these, and a GGUF file where there is only one.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.spm", "*.txt", "*.jinja")
_GGUF = "*.gguf"
LISTING = ".listing.json"
BEGINS_A_MODEL = ("config.json", "modules.json", "adapter_config.json")
_ATTEMPTS = 3  # That bring nothing, one after another.
PROGRESS_INTERVAL_S = 2.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a listing; its name is a relative path that `is_plain` accepts, or of an archive hidden.

    `read` gives the bytes from an offset on, and raises ConnectionError where a later attempt may succeed. A complete
    file must have the `sha256`, if there is one, and `is_current`. An archive is replaced by what `unpack`, which gets
    it and the folder, finds in it.
    """

    name: str
    size: int
    read: Callable[[int], Iterator[bytes]]
    sha256: str = ""
    is_current: Callable[[], bool] = lambda: True
    unpack: Callable[[Path, Path], None] | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a place, and 64 hexadecimal digits that no other contents have."""

    digest: str
    files: tuple[RemoteFile, ...]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "models"


def is_plain(name: str) -> bool:
    """Whether the name of a remote file can be one below a folder, and is that of a file which services may read."""
    has_plain_parts = all(part and not part.startswith(".") and "\0" not in part for part in name.split("/"))
    return has_plain_parts and any(fnmatchcase(name, pattern) for pattern in (*MODEL_FILES, _GGUF))


def fetch_listed(location: str, patterns: Sequence[str], resolve: Callable[[], Listing], show: Report) -> Path:
    """The folder with the files at a location that match, and an only GGUF file; raises StartupError in one line."""
    digest = hashlib.sha256(location.encode()).hexdigest()
    place = cache_folder() / f"{re.sub('[^a-z0-9]+', '-', location.lower())[-64:]}-{digest[:8]}"
    try:
        try:
            listing = resolve()
        except ConnectionError as error:
            if (folder := _earlier(place, patterns)) is None:
                raise
            show(f"cannot be reached ({error}); the files of an earlier start are used")
            return _model_folder(folder)
        folder = place / listing.digest
        names = [file.name for file in listing.files]
        chosen = set(_chosen(names, patterns))
        if not chosen:
            raise StartupError(f"{location} has no file of a model")
        _fetch_files(folder, [file for file in listing.files if file.name in chosen], show)
        unfinished = place / f"{LISTING}.{os.getpid()}-{threading.get_ident()}"
        unfinished.write_text(json.dumps({"location": location, "digest": listing.digest, "names": names}))
        unfinished.replace(place / LISTING)
        return _model_folder(folder)
    except ConnectionError as error:
        raise StartupFault(
            f"{location} cannot be reached: {error}; check the network, which containers have with MODELS_NETWORK=outer"
        ) from None
    except OSError as error:
        # A full disk may pass: StartupError judges by its cause.
        raise StartupError(f"{location}: {error.filename or place}: {error.strerror or error}") from error


def _fetch_files(folder: Path, files: Sequence[RemoteFile], show: Report) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not (folder / file.name).exists()]
    total = sum(file.size for file in missing)
    parts = (_part(folder / file.name) for file in missing)
    needed = total - sum(part.stat().st_size for part in parts if part.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise StartupFault(f"{folder}: {needed / 1e6:.1f} MB are missing, and the disk has {free / 1e6:.1f} MB")
    done = 0
    next_report = 0.0

    def progress(size: int) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report or done + size == total:
            next_report = time.monotonic() + PROGRESS_INTERVAL_S
            show(f"fetched {(done + size) / 1e6:.1f} of {total / 1e6:.1f} MB")

    for file in missing:
        _fetch_file(file, folder, progress, show)
        done += file.size


def _fetch_file(file: RemoteFile, folder: Path, progress: Callable[[int], None], show: Report) -> None:
    target = folder / file.name
    part = _part(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    while not target.exists():
        with part.open("ab") as output:
            _lock(output, show)
            if not _is_at(output, part):
                continue  # Who had it locked has completed it.
            if target.exists():
                part.unlink()
                return
            _download(file, output, part, progress)
            if file.unpack is not None:
                file.unpack(part, folder)
                output.truncate(0)
            os.fsync(output.fileno())
            part.replace(target)


def _download(file: RemoteFile, output: IO[bytes], part: Path, progress: Callable[[int], None]) -> None:
    """Completes a file from where it ends; raises ConnectionError, and StartupFault for one that is damaged."""
    attempts, size = 0, part.stat().st_size
    while size < file.size:
        before, error = size, ConnectionError("the connection was closed")
        try:
            for data in file.read(size):
                output.write(data)
                size += len(data)
                progress(size)
                if size > file.size:
                    break
        except ConnectionError as raised:
            error = raised
        output.flush()
        attempts = 0 if size > before else attempts + 1
        if size < file.size and attempts == _ATTEMPTS:
            raise error
    with part.open("rb") as complete:
        is_right = size == file.size and file.sha256 in ("", hashlib.file_digest(complete, "sha256").hexdigest())
    if not (is_right and file.is_current()):
        output.truncate(0)
        what = "has changed meanwhile" if is_right else "arrived with another digest than the one of its manifest"
        raise StartupFault(f"{file.name} {what}; the next attempt fetches it from its beginning")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _lock(file: IO[bytes], show: Report) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        show("another process fetches it")
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _chosen(names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    """Those that match, archives, and an only GGUF file, which is a model by itself."""
    models = [name for name in names if fnmatchcase(name, _GGUF)]
    for name in names:
        if name.startswith(".") or [name] == models or any(fnmatchcase(name, pattern) for pattern in patterns):
            yield name


def _earlier(place: Path, patterns: Sequence[str]) -> Path | None:
    """The folder of the last listing, if it has all that is wanted."""
    try:
        listing = json.loads((place / LISTING).read_text())
        folder = place / str(listing["digest"])
        return folder if all((folder / name).exists() for name in _chosen(listing["names"], patterns)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _model_folder(folder: Path) -> Path:
    """The folder itself, or the one below it that alone has a model."""
    if any((folder / name).is_file() for name in BEGINS_A_MODEL):
        return folder
    below = {path.parent for name in (*BEGINS_A_MODEL, _GGUF) for path in folder.rglob(name)}
    return below.pop() if len(below) == 1 else folder
