"""What keeps a stack from starting is said in one line, at once, with what to do.

What may be wrong with a model: tests/model/test_loading.py.
"""

import asyncio
import os
import socket
import sys

import pytest

from runner.free_ports import free_settings
from runner.settings import ROOT


async def start(tmp_path, **environment: str) -> tuple[int, str]:
    """Runs the runner, which must fail by itself: exit code, and what it said."""
    settings = free_settings(tmp_path)
    own = {name: str(ports[0]) for name, ports in settings.ports().items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "runner", "up"),
        cwd=ROOT,
        env=os.environ | own | {"RUN_FOLDER": str(tmp_path)} | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


CASES = {
    "context too long": ({"PREDICTOR_MAX_CONTEXT": "5000"}, "PREDICTOR_MAX_CONTEXT=5000, but its context is 1024"),
    "malformed": ({"PREDICTOR_THREADS": "many"}, "PREDICTOR_THREADS=many: Input should be a valid integer"),
    "unknown": ({"TRANSFORMER_COLOUR": "red"}, "TRANSFORMER_COLOUR: unknown setting"),
    "malformed of the gateway": ({"GATEWAY_PORT": "high"}, "GATEWAY_PORT=high"),
    "malformed MODELS": ({"MODELS": "storyteller"}, "MODELS=storyteller: 'storyteller' is not name=folder-or-hub-id"),
    "folder missing": ({"MODELS": "x=./nothing/here"}, "'./nothing/here' is not a folder"),
    "not a model": ({"MODELS": "x=tests/unit"}, "model x: tests/unit has no config.json"),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_error_is_one_line_that_says_what_to_do(tmp_path, case):
    await check(tmp_path, *CASES[case])


async def test_a_taken_port_is_named_with_its_setting(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await check(tmp_path, {"GATEWAY_PORT": str(port)}, f"port {port} is taken; set GATEWAY_PORT=")


async def check(tmp_path, environment: dict[str, str], text: str) -> None:
    code, output = await start(tmp_path, **environment)
    assert code == 1, output
    assert text in output
    assert "Traceback" not in output
