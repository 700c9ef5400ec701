"""A stack that cannot start reports the reason in one line, at once, with advice.

Errors of models: tests/model/test_loading.py.
"""

import asyncio
import os
import socket
import sys

import pytest

from headrace.errors import StartupError
from headrace_runner.settings import ROOT
from tests.support.free_ports import free_settings, start_stack

SERVICES = {
    "context too long": (
        "predictor",
        {"PREDICTOR_MAX_CONTEXT": "5000"},
        "PREDICTOR_MAX_CONTEXT=5000, but its context is 1024",
    ),
    "malformed": (
        "predictor",
        {"PREDICTOR_THREADS": "many"},
        "PREDICTOR_THREADS=many: must be an integer",
    ),
}
MODELS = {
    "folder missing": ("x=./nothing/here", "'./nothing/here' is not a folder"),
    "not a model": ("x=tests/unit", "model x: tests/unit has no config.json"),
}
RUNNER = {
    "unknown to a service": ({"TRANSFORMER_COLOUR": "red"}, "TRANSFORMER_COLOUR: unknown setting"),
    "malformed of the gateway": ({"GATEWAY_PORT": "high"}, "GATEWAY_PORT=high"),
    "malformed MODELS": ({"MODELS": "storyteller"}, "MODELS=storyteller: 'storyteller' is not name=folder-or-hub-id"),
}


def one_of(cases):
    """The first case; all of them with FULL=1."""
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.full) for case in others)]


@pytest.mark.parametrize("case", one_of(SERVICES))
async def test_a_setting_that_a_service_refuses_is_reported_by_the_stack(tmp_path, case):
    kind, settings, text = SERVICES[case]
    with pytest.raises(StartupError) as refused:
        await start_stack(tmp_path, {}, environment={kind: settings})
    assert_is_one_line(str(refused.value), text)


@pytest.mark.parametrize("case", one_of(MODELS))
async def test_a_model_that_cannot_be_loaded_is_reported_by_the_stack(tmp_path, case):
    models, text = MODELS[case]
    with pytest.raises(StartupError) as refused:
        await start_stack(tmp_path, {"models": models})
    assert_is_one_line(str(refused.value), text)


@pytest.mark.parametrize("case", one_of(RUNNER))
async def test_the_command_reports_the_error_and_fails(tmp_path, case):
    settings, text = RUNNER[case]
    code, output = await up(tmp_path, **settings)
    assert code == 1, output
    assert text in output.splitlines()[-1]
    assert "Traceback" not in output


async def test_a_taken_port_is_named_with_its_setting(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = await up(tmp_path, GATEWAY_PORT=str(port))
    assert code == 1, output
    assert output == f"port {port} is taken; set GATEWAY_PORT=… to another\n"


def assert_is_one_line(message: str, text: str) -> None:
    assert text in message
    assert "\n" not in message
    assert "Traceback" not in message


async def up(tmp_path, **environment: str) -> tuple[int, str]:
    """`python -m headrace_runner up`, which must fail by itself: its exit code and output."""
    settings = free_settings(tmp_path)
    own = {name: str(ports[0]) for name, ports in settings.ports().items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace_runner", "up"),
        cwd=ROOT,
        env=os.environ | own | {"RUN_FOLDER": str(tmp_path)} | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()
