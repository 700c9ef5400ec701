"""`make` and the runner read `.env` where there is one, and need none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_runner.command.access import LIMITS
from headrace_runner.settings import ROOT, StackSettings

CUDA = "https://download.pytorch.org/whl/cu130"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", ".env.example", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(checkout: Path, *target: str) -> str:
    """The commands that make would run, with an environment without settings."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TORCH_INDEX", "GATEWAY_PORT")}
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", *target]
    done = subprocess.run(command, cwd=checkout, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_file_make_has_the_defaults(checkout: Path) -> None:
    shown = commands(checkout, ".venv/.installed-run", "test-tools")
    assert "--index-url https://download.pytorch.org/whl/cpu '" in shown
    assert "127.0.0.1:${GATEWAY_PORT:-8080}" in shown


def test_a_line_of_the_file_wins(checkout: Path) -> None:
    (checkout / ".env").write_text(f"GATEWAY_PORT=8085\nTORCH_INDEX={CUDA}\n")
    shown = commands(checkout, ".venv/.installed-run", "test-tools")
    assert f"--index-url {CUDA} '" in shown
    assert "127.0.0.1:${GATEWAY_PORT:-8085}" in shown
    settings = StackSettings(_env_file=checkout / ".env")  # type: ignore[call-arg]
    assert settings.gateway_port == int(os.environ.get("GATEWAY_PORT", "8085"))


def test_an_empty_index_means_pips_own(checkout: Path) -> None:
    (checkout / ".env").write_text("TORCH_INDEX=\n")
    assert "--index-url" not in commands(checkout, ".venv/.installed-run")


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": "3.12.4", "python3.13": "3.13.1"}, "python3"),
        ({"python3": "3.9.2", "python3.11": "3.11.2", "python3.13": "3.13.1"}, "python3.13"),
        ({"python3": "3.14.0", "python3.11": "3.11.2", "python3.12": "no such version"}, "python3.11"),
        ({"python3": "3.10.1"}, "python3"),  # Which is then refused.
    ],
)
def test_the_python_is_the_usual_one_else_the_newest_that_fits(
    checkout: Path, versions: dict[str, str], chosen: str
) -> None:
    folder = checkout / "bin"
    folder.mkdir()
    for name, version in versions.items():
        numbers = ", ".join(version.split(".")) if version[0].isdigit() else "0, 0"
        own = f"import sys; sys.version_info = ({numbers}); exec(sys.argv[2])"
        (folder / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{own}' \"$@\"\n")
        (folder / name).chmod(0o755)
    for name in ("make", "bash", "cat", "sed", "tail"):
        (folder / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", "show: ; @echo $(PYTHON)", "show"],
        cwd=checkout,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{chosen}\n", done.stderr


def test_make_key_has_every_limit(checkout: Path) -> None:
    options = commands(checkout, "key", "NAME=alice", *(f"{name.upper()}=7" for name in LIMITS)).split("key 'alice'")[1]
    assert {f"--{name.replace('_', '-')}" for name in LIMITS} == set(options.split()) - {"\\", "'7'"}
