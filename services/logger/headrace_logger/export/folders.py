"""Folders for exports: of this machine, or of an object store by its URL.

A file appears under its name once it is complete. Of this machine's files only the owner can read them. URLs are those
of pyarrow's file systems: s3://bucket/prefix, gs://…, abfs://…, with credentials from the usual variables
(AWS_ACCESS_KEY_ID, …) and options in the query (?region=…&endpoint_override=host:port&scheme=http).

Errors: StartupError, one line, if the folder cannot be used.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from pyarrow import fs

from headrace.errors import StartupError
from headrace.files import private_file

_PIECE_BYTES = 8 * 1024 * 1024


class Folder(Protocol):
    def names(self, below: str) -> list[str]:
        """The names of the files in a folder below this one, which may be missing."""

    @contextmanager
    def writing(self, below: str, name: str) -> Iterator[IO[bytes]]:
        """A new file in a folder below this one; it appears if the block succeeds."""


@contextmanager
def open_folder(output: str) -> Iterator[Folder]:
    """The folder of a path or URL; a folder of this machine is created, and locked against other exports."""
    filesystem, path = _file_system(output)
    if isinstance(filesystem, fs.LocalFileSystem):
        with _locked(Path(path), output):
            yield LocalFolder(Path(path))
        return
    yield RemoteFolder(output, filesystem, path.rstrip("/"))


def shown(output: str) -> str:
    """The path or URL for messages: without credentials and options."""
    return re.sub(r"://[^/@]*@", "://", output.partition("?")[0]) if "://" in output else output


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self, below: str) -> list[str]:
        with _errors_of(str(self._path)):
            return os.listdir(self._path / below) if (self._path / below).is_dir() else []

    @contextmanager
    def writing(self, below: str, name: str) -> Iterator[IO[bytes]]:
        folder = self._path / below
        with _errors_of(str(self._path)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with private_file(folder / name, str(folder / name)) as file:
            yield file


class RemoteFolder:
    """A folder of one of pyarrow's file systems; `url` names it in errors."""

    def __init__(self, url: str, filesystem: fs.FileSystem, path: str) -> None:
        self._url = url
        self._filesystem = filesystem
        self._path = path

    def names(self, below: str) -> list[str]:
        selector = fs.FileSelector(f"{self._path}/{below}", allow_not_found=True)
        with _errors_of(self._url):
            return [info.base_name for info in self._filesystem.get_file_info(selector)]

    @contextmanager
    def writing(self, below: str, name: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with _errors_of(self._url):
                self._upload(file, f"{self._path}/{below}/{name}")

    def _upload(self, file: IO[bytes], path: str) -> None:
        try:
            with self._filesystem.open_output_stream(path) as stream:
                shutil.copyfileobj(file, stream, _PIECE_BYTES)
        except BaseException as error:
            # Closing the stream completes the object, also of an upload that was interrupted.
            if not isinstance(error, OSError):
                self._filesystem.delete_file(path)
            raise


def _file_system(output: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URL, and the path there."""
    if "://" not in output:
        return fs.LocalFileSystem(), output
    with _errors_of(output):
        filesystem, path = fs.FileSystem.from_uri(output)
    return filesystem, path


@contextmanager
def _locked(path: Path, output: str) -> Iterator[None]:
    with _errors_of(output):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"--output {output}: another export writes to it") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _errors_of(output: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        description = getattr(error, "strerror", None) or " ".join(str(error).replace(output, shown(output)).split())
        raise StartupError(f"--output {shown(output)}: {description}") from None
