"""KServe's own transformer class works before our predictor, and before the gateway, unchanged."""

import asyncio
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-kserve" / "bin" / "python"
SCRIPT = ROOT / "tests" / "kserve" / "transformer.py"


@pytest.mark.skipif(
    not PYTHON.exists(), reason="KServe's own environment is not installed (make .venv-kserve/.installed)"
)
async def test_kserves_transformer_calls_the_predictor_and_the_gateway(new_stack):
    stack = await new_stack(models="identity=models/identity")
    for address in (stack.addresses["predictor-0"], stack.gateway):
        command = [str(PYTHON), str(SCRIPT), address, "identity"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
        assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
