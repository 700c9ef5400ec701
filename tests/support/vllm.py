"""The interpreter with vLLM, how its engine starts fast enough for tests, and its process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PYTHON = Path(__file__).parents[2] / ".venv-bench-vllm" / "bin" / "python"
ARGUMENTS = {"enforce_eager": True}
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no interpreter with vLLM: `make .venv-bench-vllm/.installed`"
)


def vllm_process(predictor: int) -> psutil.Process | None:
    """The process with vLLM of the predictor with this process id."""
    for child in psutil.Process(predictor).children():
        with suppress(psutil.NoSuchProcess):  # Zombies too.
            if "services.predictor.vllm_engine" in child.cmdline():
                return child
    return None
