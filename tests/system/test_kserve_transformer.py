"""KServe's own transformer class works before our predictor, and before the gateway, unchanged."""

import asyncio
import subprocess
from pathlib import Path

from tests.system.own_clients import python_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "kserve" / "transformer.py"


async def test_kserves_transformer_calls_the_predictor_and_the_gateway(new_stack):
    python = python_of(".venv-kserve")
    stack = await new_stack(models="identity=models/identity")
    command = [python, str(SCRIPT), "identity", stack.addresses["predictor-0"], stack.gateway]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-2:] == ["done", "done"], done.stderr
