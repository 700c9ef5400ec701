"""The interpreter with vLLM, and how its engine starts fast enough for tests."""

from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-bench-vllm" / "bin" / "python"
ARGUMENTS = {"enforce_eager": True}
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="no interpreter with vLLM: `make .venv-bench-vllm/.installed`"
)
