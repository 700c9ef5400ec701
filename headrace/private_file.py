"""A file that only its owner can read, and that is there once it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headrace.errors import StartupError


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
