"""An installation shows what pip does, and how large it is."""

from __future__ import annotations

from pathlib import Path

from headrace_runner.install import Progress


def test_the_line_shows_the_progress_of_pip(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0-cp311.whl"
    wheel.write_bytes(bytes(2_000_000))
    installed = 4
    progress = Progress(lambda: installed)
    assert str(progress) == "reading the package index"
    for line in (
        f"Processing {wheel}\n",
        "Processing /home/me/headrace\n",
        "Collecting grpcio>=1.85 (from headrace==0.1.0)\n",
        "  Downloading grpcio-1.85.1-cp311-manylinux_2_17_x86_64.whl (7.4 MB)\n",
        "WARNING: something of no interest\n",
        "  Using cached grpcio_health_checking-1.85.1-py3-none-any.whl (20 kB)\n",
    ):
        progress.read(line)
    assert str(progress) == "3 packages found, 9 MB; grpcio_health_checking (0.0 MB)"
    progress.read("Installing collected packages: torch, grpcio, grpcio-health-checking\n")
    assert str(progress) == "0 of 3 packages installed"
    installed = 6
    assert str(progress) == "2 of 3 packages installed"
    assert progress.result() == "3 packages, 9 MB"


def test_nothing_to_install() -> None:
    progress = Progress(lambda: 1)
    progress.read("Requirement already satisfied: torch in ./.venv/lib\n")
    assert progress.result() == "up to date"
