"""The contenders: modules in `bench.workers`, each in the project's environment or in one that `make` installs.

Remove a `.venv-bench-*` folder to reinstall it.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import cases

ROOT = Path(__file__).resolve().parent.parent
_VLLM, _CTRANSLATE2 = ".venv-bench-vllm", ".venv-bench-ctranslate2"


@dataclass(frozen=True)
class Contender:
    """A module of `bench.workers`, its arguments after the model's folder, and its environment ("": the project's)."""

    module: str
    arguments: tuple[str, ...] = ()
    environment: str = ""

    @property
    def python(self) -> str:
        return str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable

    def install(self) -> str | None:
        """Installs its environment if it is missing; returns the reason of a failure."""
        return install(self.environment) if self.environment else None


def install(environment: str) -> str | None:
    """Installs a folder `.venv-…` with `make` if it is missing; returns the reason of a failure."""
    make = ("make", f"{environment}/.installed")
    if subprocess.run(make, cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        return f"not installed: `{' '.join(make)}` fails"
    return None


CONTENDERS = {
    cases.HEADRACE: Contender("headrace_engine"),
    cases.BATCHING: Contender("transformers_batching"),
    cases.GENERATE: Contender("static_generate"),
    cases.VLLM: Contender("vllm_offline", environment=_VLLM),
    cases.CT2_FP32: Contender("ctranslate2_generator", ("float32",), _CTRANSLATE2),
    cases.CT2_INT8: Contender("ctranslate2_generator", ("int8",), _CTRANSLATE2),
}
