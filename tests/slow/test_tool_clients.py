"""Clients with tools of other projects, unmodified, before the real stack: their own calls, whole and streamed.

Benchmarks and evaluations of `make test-tools` too, before vLLM's server.

LangChain, LiteLLM, instructor and OpenAI's client for Python, OpenAI's client for Node and Vercel's AI SDK, with models
of our predictors, and one of vLLM's server where that is installed. Skipped where they are not installed:
`make .venv-tools/tool-clients/.installed .venv-tools/node-clients/.installed`; the benchmarks are those of
`make test-tools`.
"""

import asyncio
import os
import shutil
import subprocess

import pytest
import pytest_asyncio

from bench.vllm_server import vllm_server
from headrace_runner.settings import ROOT
from tests.support.tool_models import save_tool_model
from tests.support.vllm import needs_vllm

TOOLS = ROOT / ".venv-tools"
PYTHON, NODE = TOOLS / "tool-clients", TOOLS / "node-clients"
SCRIPTS = ROOT / "tests" / "clients"
LIMIT_S = 240
START_S = 600  # Of vLLM's server.
BENCHMARKS = ("genai-perf", "guidellm", "lm-eval")


async def passes(command, folder):
    # LiteLLM loads a list of prices when it is imported, and has a copy.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": folder, "env": environment}
    done = await asyncio.to_thread(subprocess.run, list(map(str, command)), **options)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest_asyncio.fixture(scope="module", params=["hermes", "llama", pytest.param("vllm", marks=needs_vllm)])
async def models(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    if request.param != "vllm":
        yield f"caller={save_tool_model(root / 'caller', request.param)}"
        return
    folder = save_tool_model(root / "caller", "hermes")
    # The model would never end JSON's whitespace.
    form = ("--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}')
    arguments = ("--enforce-eager", "--max-model-len", "1024", *form)
    async with vllm_server(folder, "caller", root / "vllm.log", *arguments, dtype="float32") as server:
        yield f"caller=http://{server.address}/v1;tokenizer={folder}"


@pytest.mark.timeout(START_S + 2 * LIMIT_S)
async def test_pythons_clients_call_tools(stacks, models, tmp_path):
    if not (PYTHON / ".installed").exists():
        pytest.skip(f"{PYTHON.name} is missing: make .venv-tools/{PYTHON.name}/.installed")
    async with stacks.use(models=models) as stack:
        await passes([PYTHON / "bin" / "python", SCRIPTS / "tool_clients.py", stack.gateway, "caller"], tmp_path)


@pytest.mark.timeout(START_S + 2 * LIMIT_S)
async def test_nodes_clients_call_tools(stacks, models, tmp_path):
    if not (NODE / ".installed").exists():
        pytest.skip(f"{NODE.name} is missing: make .venv-tools/{NODE.name}/.installed")
    script = tmp_path / "tool_clients.mjs"  # Node looks for modules beside a script.
    shutil.copy(SCRIPTS / "tool_clients.mjs", script)
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    async with stacks.use(models=models) as stack:
        await passes(["node", script, stack.gateway, "caller"], tmp_path)


@needs_vllm
@pytest.mark.timeout(START_S + 8 * LIMIT_S)
async def test_benchmarks_and_evaluations_run_before_vllm(stacks, tmp_path):
    if missing := [name for name in BENCHMARKS if not (TOOLS / name / ".installed").exists()]:
        pytest.skip(f"{', '.join(missing)} missing: make test-tools")
    model = ROOT / "models" / "storyteller"
    async with (
        vllm_server(model, model.name, tmp_path / "vllm.log", "--max-model-len", "1024", dtype="float32") as server,
        stacks.use(models=f"{model.name}=http://{server.address}/v1;tokenizer={model}") as stack,
    ):
        process = await asyncio.create_subprocess_exec(ROOT / "tests" / "tools" / "run", stack.gateway)
        assert await process.wait() == 0
