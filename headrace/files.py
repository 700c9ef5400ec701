"""Files between processes: an operator's file that is read again when it changes, and files that are written whole.

If the new contents of an operator's file are invalid, the last valid ones stay in effect.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import yaml
from opentelemetry import metrics

from headrace.errors import StartupError

logger = logging.getLogger(__name__)

POLL_S = 0.5

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """`parse` turns the file's text into `value` and raises ValueError, with one line that names the fault.

    If the first contents are invalid, `value` is `default`; without a default StartupError is raised.
    """

    def __init__(self, path: Path, parse: Callable[[str], T], default: T | None = None) -> None:
        self._path = path
        self._parse = parse
        self._reloads = metrics.get_meter("headrace").create_counter("headrace.config.reloads")
        self._seen = self._version()
        try:
            self.value = self._read()
        except ValueError as error:
            if default is None:
                raise StartupError(f"{path}: {error}") from None
            logger.error("%s: %s; the last valid contents stay in effect", path, error)
            self.value = default

    async def watch(self, changed: Callable[[T], None]) -> None:
        """Calls `changed`, in a thread, with every new value, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            version = await asyncio.to_thread(self._version)
            if version == self._seen:
                continue
            self._seen = version
            try:
                self.value = await asyncio.to_thread(self._read)
                await asyncio.to_thread(changed, self.value)
            except ValueError as error:
                self._count("refused")
                logger.error("%s: %s; the last valid contents stay in effect", self._path, error)
                continue
            self._count("applied")
            logger.info("%s was read again", self._path)

    def _version(self) -> tuple[int, int, int] | None:
        """Differs once the file was written or replaced."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> T:
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ValueError(f"cannot be read: {reason}") from None
        return self._parse(text)

    def _count(self, outcome: str) -> None:
        self._reloads.add(1, {"file": self._path.name, "outcome": outcome})


def load_yaml(text: str) -> Any:
    """The document in a file's text; raises ValueError with the line at fault."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"is not YAML{f', line {mark.line + 1}' if mark else ''}") from None


def replace_file(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Writes a file that others read: they see the whole old contents or the whole new ones. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)  # Its mode may be another.
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def private_file(path: Path, described: str) -> Iterator[IO[bytes]]:
    """A new file that gets its name, and replaces another one, only if the block succeeds.

    Only its owner can read it: it contains prompts. Raises StartupError, which begins with `described`.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                yield file
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StartupError(f"{described}: {error.strerror}") from None
