"""What keeps a stack from starting is said in one line, at once, with what to do."""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Iterator

import pytest
import torch

from runner.free_ports import free_settings
from runner.settings import ROOT
from tests.hub import GATED, serve_hub


@pytest.fixture
def hub() -> Iterator[str]:
    with serve_hub({}) as address:
        yield address


async def start(tmp_path, **environment: str) -> tuple[int, str]:
    """Runs the runner, which must fail by itself: exit code, and what it said."""
    settings = free_settings(tmp_path)
    own = {name: str(ports[0]) for name, ports in settings.ports().items()}
    own |= {"RUN_FOLDER": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "runner", "up"),
        cwd=ROOT,
        env=inherited | own | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


CASES = {
    "no CUDA": ({"DEVICE": "cuda"}, "DEVICE=cuda, but torch finds no CUDA device; install its CUDA build"),
    "cache too small": (
        {"PREDICTOR_KV_CACHE_MEMORY": "100KiB", "PREDICTOR_MAX_CONTEXT": "512"},
        "model storyteller: context 512 needs 0.0017 GB, have 0.0001",
    ),
    "context too long": ({"PREDICTOR_MAX_CONTEXT": "5000"}, "PREDICTOR_MAX_CONTEXT=5000, but its context is 1024"),
    "malformed": ({"PREDICTOR_THREADS": "many"}, "PREDICTOR_THREADS=many: Input should be a valid integer"),
    "unknown": ({"TRANSFORMER_COLOUR": "red"}, "TRANSFORMER_COLOUR: unknown setting"),
    "malformed of the gateway": ({"GATEWAY_PORT": "high"}, "GATEWAY_PORT=high"),
    "malformed MODELS": ({"MODELS": "storyteller"}, "MODELS=storyteller: 'storyteller' is not name=folder-or-hub-id"),
    "folder missing": ({"MODELS": "x=./nothing/here"}, "'./nothing/here' is not a folder"),
    "not a model": ({"MODELS": "x=tests/unit"}, "model x: tests/unit has no config.json"),
    "hub away": (
        {"MODELS": "x=somebody/something", "HF_ENDPOINT": "http://127.0.0.1:9"},
        "model x: somebody/something: the hub cannot be reached; check the network",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_error_is_one_line_that_says_what_to_do(tmp_path, case):
    if case == "no CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    await check(tmp_path, *CASES[case])


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"version https://git-lfs"), ("generation_config.json", b"{"), ("config.json", b"{}")],
)
async def test_a_damaged_model_is_named(tmp_path, name, content):
    folder = tmp_path / "damaged"
    shutil.copytree(ROOT / "models" / "storyteller", folder)
    (folder / name).write_bytes(content)
    await check(tmp_path, {"MODELS": f"x={folder}"}, "model x")


async def test_a_model_py_that_cannot_be_imported_is_named_with_its_line(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("import numpy\nimport nothing_like_it\n")
    environment = {"MODELS": f"x={tmp_path / 'mine'}"}
    await check(tmp_path, environment, "model.py, line 2 cannot be imported: ModuleNotFoundError: No module named")


async def test_a_gated_model_names_the_token(tmp_path, hub):
    environment = {"MODELS": f"x={GATED}", "HF_ENDPOINT": hub}
    await check(
        tmp_path, environment, "model x: somebody/gated is gated: accept its licence on the hub and set HF_TOKEN"
    )


async def test_a_model_that_the_hub_does_not_have_is_named(tmp_path, hub):
    environment = {"MODELS": "x=somebody/nothing", "HF_ENDPOINT": hub}
    await check(tmp_path, environment, "somebody/nothing is neither a folder nor on the hub")


async def test_a_taken_port_is_named_with_its_setting(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await check(tmp_path, {"GATEWAY_PORT": str(port)}, f"port {port} is taken; set GATEWAY_PORT=")


async def check(tmp_path, environment: dict[str, str], text: str) -> None:
    code, output = await start(tmp_path, **environment)
    assert code == 1, output
    assert text in output
    assert "Traceback" not in output
