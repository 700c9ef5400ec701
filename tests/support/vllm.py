"""The interpreter with vLLM, which benchmarks and tests run as a server."""

from pathlib import Path

import pytest

_PYTHON = Path(__file__).parents[2] / ".venv-bench-vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not _PYTHON.exists(), reason="no interpreter with vLLM: `make .venv-bench-vllm/.installed`"
)
