"""Unmodified clients of other projects, in their own environments, which `make` installs."""

import asyncio
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(environment=".venv-clients"):
    """The interpreter of an environment; skips the test where it is not installed."""
    if not (ROOT / environment / ".installed").exists():
        pytest.skip(f"{environment} is not installed (make {environment}/.installed)")
    return str(ROOT / environment / "bin" / "python")


async def client_passes(script, *arguments, environment=".venv-clients"):
    """Runs a script of tests/clients, which prints `done` if all its checks pass."""
    command = [python_of(environment), str(ROOT / "tests" / "clients" / f"{script}.py"), *map(str, arguments)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
