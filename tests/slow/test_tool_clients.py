"""Clients with tools of other projects, unmodified, before the real stack: their own calls, whole and streamed.

LangChain, LiteLLM, instructor and OpenAI's client for Python, OpenAI's client for Node and Vercel's AI SDK. Skipped
where they are not installed: `make .venv-tools/tool-clients/.installed .venv-tools/node-clients/.installed`.
"""

import asyncio
import os
import shutil
import subprocess

import pytest

from headrace_runner.settings import ROOT
from tests.support.tool_models import save_tool_model

TOOLS = ROOT / ".venv-tools"
PYTHON, NODE = TOOLS / "tool-clients", TOOLS / "node-clients"
SCRIPTS = ROOT / "tests" / "clients"
LIMIT_S = 240


async def passes(command, folder):
    # LiteLLM loads a list of prices when it is imported, and has a copy.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": folder, "env": environment}
    done = await asyncio.to_thread(subprocess.run, list(map(str, command)), **options)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.fixture(scope="module", params=["hermes", "llama"])
def models(request, tmp_path_factory):
    folder = save_tool_model(tmp_path_factory.mktemp("models") / "caller", request.param)
    return f"caller={folder}"


@pytest.mark.timeout(2 * LIMIT_S)
async def test_pythons_clients_call_tools(stacks, models, tmp_path):
    if not (PYTHON / ".installed").exists():
        pytest.skip(f"{PYTHON.name} is missing: make .venv-tools/{PYTHON.name}/.installed")
    async with stacks.use(models=models) as stack:
        await passes([PYTHON / "bin" / "python", SCRIPTS / "tool_clients.py", stack.gateway, "caller"], tmp_path)


@pytest.mark.timeout(2 * LIMIT_S)
async def test_nodes_clients_call_tools(stacks, models, tmp_path):
    if not (NODE / ".installed").exists():
        pytest.skip(f"{NODE.name} is missing: make .venv-tools/{NODE.name}/.installed")
    script = tmp_path / "tool_clients.mjs"  # Node looks for modules beside a script.
    shutil.copy(SCRIPTS / "tool_clients.mjs", script)
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    async with stacks.use(models=models) as stack:
        await passes(["node", script, stack.gateway, "caller"], tmp_path)
