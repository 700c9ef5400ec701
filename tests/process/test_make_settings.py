"""`make` and the runner read `.env` where there is one, and need none."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    done = subprocess.run(command, cwd=checkout, env=inherited, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_file_make_has_the_defaults(checkout: Path) -> None:
    assert "--index-url https://download.pytorch.org/whl/cpu '" in commands(checkout, ".venv/.installed-run")
    assert "127.0.0.1:${GATEWAY_PORT:-8080}" in commands(checkout, "test-tools")


def test_a_line_of_the_file_wins(checkout: Path) -> None:
    (checkout / ".env").write_text(f"GATEWAY_PORT=8085\nTORCH_INDEX={CUDA}\n")
    assert f"--index-url {CUDA} '" in commands(checkout, ".venv/.installed-run")
    assert "127.0.0.1:${GATEWAY_PORT:-8085}" in commands(checkout, "test-tools")
    settings = StackSettings(_env_file=checkout / ".env")  # type: ignore[call-arg]
    assert settings.gateway_port == int(os.environ.get("GATEWAY_PORT", "8085"))


def test_an_empty_index_means_pips_own(checkout: Path) -> None:
    (checkout / ".env").write_text("TORCH_INDEX=\n")
    assert "--index-url" not in commands(checkout, ".venv/.installed-run")


def test_make_key_has_every_limit(checkout: Path) -> None:
    options = commands(checkout, "key", "NAME=alice", *(f"{name.upper()}=7" for name in LIMITS)).split("key 'alice'")[1]
    assert {f"--{name.replace('_', '-')}" for name in LIMITS} == set(options.split()) - {"\\", "'7'"}
