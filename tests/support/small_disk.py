"""A small disk of its own for a test, to fill: a tmpfs, which needs root's right to mount."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_BALLAST = "ballast"
_BLOCK = 4096


class SmallDisk:
    """A mounted disk; `fill` takes all of its bytes or inodes, `empty` gives them back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, what: str = "bytes", spare_bytes: int = 0) -> None:
        """Takes every byte but `spare_bytes`, every inode, or the right to write."""
        if what == "read-only":
            # Open files forbid it to `mount -o remount,ro`, so the same disk covers itself.
            _mount("--bind", str(self.path), str(self.path))
            _mount("-o", "remount,bind,ro", str(self.path))
            return
        ballast = self.path / _BALLAST
        ballast.mkdir(exist_ok=True)
        with suppress(OSError):
            if what == "inodes":
                for number in range(1_000_000):
                    (ballast / str(number)).touch()
            with (ballast / "bytes").open("ab", buffering=0) as file:
                while os.statvfs(self.path).f_bavail * _BLOCK > spare_bytes:
                    file.write(bytes(_BLOCK))

    def empty(self, what: str = "bytes") -> None:
        if what == "read-only":
            subprocess.run(("umount", "--lazy", str(self.path)), check=True)
            return
        for file in (self.path / _BALLAST).iterdir():
            file.unlink()


def _mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True, capture_output=True)


@contextmanager
def small_disk(path: Path, megabytes: int = 8, inodes: int = 200, kilobytes: int = 0) -> Iterator[SmallDisk]:
    """A disk of this size mounted at a new folder; skips the test where this process may not mount."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        size = kilobytes or megabytes * 1024
        _mount("-t", "tmpfs", "-o", f"size={size}k,nr_inodes={inodes},mode=700", "none", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a disk")
    try:
        yield SmallDisk(path)
    finally:
        while subprocess.run(("umount", "--lazy", str(path)), capture_output=True).returncode == 0:
            pass
