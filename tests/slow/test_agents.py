"""Agents of other projects, unmodified, run a session with tools and a typed result before the real stack.

The model answers what a test has written, at a predictor of ours and at an engine of another maker: see ScriptedTexts
and EngineTexts. The rest of the stack is real. Skipped where an agent is not installed:
`make .venv-tools/agent-clients/.installed .venv-tools/node-clients/.installed`.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections import deque
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from headrace.rpc.server.listeners import READY
from headrace_runner.settings import ROOT
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_predictor import ScriptedPredictor, serving, whole
from tests.support.tool_models import STORYTELLER, save_tool_model

TOOLS = ROOT / ".venv-tools"
PYTHON, NODE = TOOLS / "agent-clients", TOOLS / "node-clients"
CLIENTS = ROOT / "tests" / "clients"
CONTEXT = 262_144  # The declarations of a coding agent's tools are long.
LIMIT_S = 180
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}


class ScriptedTexts(ScriptedPredictor):
    """Answers each prompt with the next of `texts`."""

    def __init__(self):
        super().__init__(models=("caller", "thinker"))
        self._tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
        self.script = deque([self._write] * 1000)
        self.texts = deque()

    @property
    def prompts(self):
        return [self._tokenizer.decode(list(call.request.prompt_ids), skip_special_tokens=False) for call in self.calls]

    @staticmethod
    async def _write(predictor, call):
        predictor.answer = predictor._tokenizer.encode(predictor.texts.popleft(), add_special_tokens=False).ids
        async for count in whole(predictor, call):
            yield count

    async def ModelConfig(self, request, context):  # noqa: N802
        response = await super().ModelConfig(request, context)
        response.config.parameters["context_length"].string_value = str(CONTEXT)
        return response


class EngineTexts(ScriptedEngine):
    """The same as a server of vLLM's API."""

    models = ("caller", "thinker")

    def __init__(self):
        super().__init__(str(STORYTELLER))
        self.reason, self.context = "stop", CONTEXT
        self.texts = deque()

    @property
    def calls(self):
        return self.requests

    @property
    def prompts(self):
        return [self._tokenizer.decode(body["prompt"], skip_special_tokens=False) for _, body, _ in self.requests]

    def ids_after(self, ids, count):
        """The next text; one token for the proof that the engine answers."""
        text = "a" if count == 1 else self.texts.popleft()
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@pytest_asyncio.fixture(scope="module", params=[ScriptedTexts, EngineTexts])
async def running(request, stacks, tmp_path_factory):
    root, predictor = tmp_path_factory.mktemp("models"), request.param()
    folders = {}
    for name in predictor.models:
        folder = await asyncio.to_thread(save_tool_model, root / name, "hermes", thinks=name == "thinker")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        folders[name] = folder
    async with AsyncExitStack() as held:
        if isinstance(predictor, EngineTexts):
            await held.enter_async_context(predictor)
            settings = {
                "models": ",".join(f"{name}={predictor.address};tokenizer={one}" for name, one in folders.items())
            }
        else:
            address = await held.enter_async_context(serving(predictor, healthy=("", READY)))
            models = ",".join(f"{name}={folder}" for name, folder in folders.items())
            settings = {"models": models, "predictors": 0, "predictor_endpoints": address}
        yield await held.enter_async_context(stacks.use(**settings)), predictor


@pytest.fixture
def scripted(running):
    stack, predictor = running
    predictor.calls.clear()
    predictor.texts.clear()
    return stack, predictor


def call_of(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def needs(folder):
    if not (folder / ".installed").exists():
        pytest.skip(f"{folder.name} is missing: make .venv-tools/{folder.name}/.installed")


async def output_of(command, folder, **environment):
    """What a command writes; it has nothing of this process's environment but the path."""
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), **environment}
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": folder, "env": given}
    done = await asyncio.to_thread(subprocess.run, list(map(str, command)), stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def note(tmp_path):
    file = tmp_path / "note.txt"
    file.write_text("The number is 4711.\n")
    return file


@pytest.mark.timeout(2 * LIMIT_S)
async def test_claude_code_reads_a_file_and_has_a_typed_result(scripted, note, tmp_path):
    needs(NODE)
    stack, predictor = scripted
    predictor.texts += [
        f"I must look.</think>I look.\n{call_of('Read', file_path=str(note))}",
        f"It is there.</think>{call_of('StructuredOutput', number=4711)}",
    ]
    command = [NODE / "node_modules/.bin/claude", "-p", "Which number is in note.txt?", "--output-format", "json"]
    written = await output_of(
        [*command, "--json-schema", json.dumps(SCHEMA)],
        tmp_path,
        ANTHROPIC_BASE_URL=f"http://{stack.gateway}",
        ANTHROPIC_AUTH_TOKEN="any",
        ANTHROPIC_MODEL="thinker",
        ANTHROPIC_SMALL_FAST_MODEL="thinker",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(written)
    assert (result["is_error"], result["structured_output"]) == (False, {"number": 4711})
    assert "(I must look.) I look.<tool_call>" in predictor.prompts[1]
    assert "The number is 4711." in predictor.prompts[1].rpartition("</tool_call>")[2]


@pytest.mark.timeout(2 * LIMIT_S)
async def test_codex_runs_a_command_and_has_a_typed_result(scripted, note, tmp_path):
    needs(NODE)
    stack, predictor = scripted
    predictor.texts += [
        f"I must look.</think>I look.\n{call_of('exec_command', cmd='cat note.txt')}",
        'It is there.</think>{"number": 4711}',
    ]
    (tmp_path / ".codex").mkdir()
    provider = f'name = "Headrace"\nbase_url = "http://{stack.gateway}/v1"\nwire_api = "responses"\n'
    settings = f'model = "thinker"\nmodel_provider = "headrace"\n[model_providers.headrace]\n{provider}'
    (tmp_path / ".codex" / "config.toml").write_text(settings)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    command = [NODE / "node_modules/.bin/codex", "exec", *options, "--output-schema", tmp_path / "schema.json"]
    events = list(map(json.loads, (await output_of([*command, "Which number?"], tmp_path)).splitlines()))
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["exit_code"] for item in items if item["type"] == "command_execution"] == [0]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["I look.", '{"number": 4711}']
    assert "(I must look.) I look.<tool_call>" in predictor.prompts[1]
    assert "The number is 4711." in predictor.prompts[1].rpartition("</tool_call>")[2]


WEATHER = [call_of("weather", city="Rome"), '{"city": "Rome", "is_warm": true}']


@pytest.mark.timeout(2 * LIMIT_S)
async def test_pythons_agents_call_a_tool_and_have_a_typed_result(scripted, tmp_path):
    needs(PYTHON)
    stack, predictor = scripted
    predictor.texts += WEATHER * 8
    command = [PYTHON / "bin" / "python", CLIENTS / "agent_sessions.py", stack.gateway]
    assert (await output_of(command, tmp_path)).endswith("done\n")
    assert all("28 degrees" in prompt for prompt in predictor.prompts[1::2])


@pytest.mark.timeout(2 * LIMIT_S)
async def test_vercels_ai_sdk_calls_a_tool_and_has_a_typed_result(scripted, tmp_path):
    needs(NODE)
    stack, predictor = scripted
    predictor.texts += WEATHER * 6
    script = tmp_path / "agent_sessions.mjs"  # Node looks for modules beside a script.
    shutil.copy(CLIENTS / "agent_sessions.mjs", script)
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    assert (await output_of(["node", script, stack.gateway], tmp_path)).endswith("done\n")
    assert all("28 degrees" in prompt for prompt in predictor.prompts[1::2])
