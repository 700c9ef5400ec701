"""From a clean engine to an answer."""

import json
import os
import re
import shutil
import subprocess
import uuid

import pytest

from tests.containers.stack import ROOT
from tests.system.own_clients import python_of

CLIENTS_PAGE = (ROOT / "docs" / "clients.md").read_text()
BUF = ROOT / ".tools" / "node_modules" / ".bin"
PATH = f"{BUF}{os.pathsep}{os.environ['PATH']}"
CODE = ROOT / "headrace" / "__init__.py"


def run(stack, *command: str) -> str:
    command = tuple(part.replace("127.0.0.1:8080", stack.gateway) for part in command)
    done = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def buf(stack, method: str, request: dict) -> list[dict]:
    """The messages of a call that `buf curl` makes by reflection."""
    if shutil.which("buf", path=PATH) is None:
        pytest.skip("buf is not installed (npm package @bufbuild/buf)")
    url = f"http://{stack.gateway}/{method}"
    output = run(stack, "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request), url)
    decoder, messages = json.JSONDecoder(), []
    while output := output.lstrip():
        message, end = decoder.raw_decode(output)
        messages.append(message)
        output = output[end:]
    return messages


def test_buf_curl_streams(stack):
    request = {"model": "storyteller", "prompt": "Once upon a time", "maxTokens": 30, "ignoreEos": True, "pace": 50}
    with stack.timed("buf curl: 30 tokens"):
        messages = buf(stack, "headrace.v1.TextGeneration/Generate", request)
    assert len(messages) >= 20
    assert messages[-1]["finishReason"] == "length"


def test_curl_streams(stack):
    body = json.dumps(
        {"model": "storyteller", "prompt": "Once", "max_tokens": 20, "ignore_eos": True, "pace": 50, "stream": True}
    )
    with stack.timed("curl: 20 tokens as server-sent events"):
        output = run(stack, "curl", "-sSN", "http://127.0.0.1:8080/v1/completions", "-d", body)
    assert output.count("data: {") >= 10
    assert output.rstrip().endswith("data: [DONE]")


def script_with(client):
    """The script of the documentation that imports a client."""
    (script,) = [one for one in re.findall(r"```python\n(.*?)```", CLIENTS_PAGE, re.DOTALL) if client in one]
    return script


def test_tritons_own_client_streams(stack):
    with stack.timed("tritonclient: 40 tokens"):
        output = run(stack, python_of(), "-c", script_with("tritonclient"))
    assert len(output.split()) > 20  # On a busy machine one message may have many tokens.


def test_anthropics_own_client_streams(stack):
    with stack.timed("anthropic: an answer"):
        output = run(stack, python_of(), "-c", script_with("anthropic"))
    assert len(output.split()) > 20


def test_a_change_of_code_is_built_in_seconds(stack):
    before = CODE.read_bytes()
    try:
        CODE.write_bytes(before + f"\n# {uuid.uuid4()}\n".encode())
        with stack.timed("build after a change of code"):
            stack.compose("build")
    finally:
        CODE.write_bytes(before)
    assert stack.took("build after a change of code") <= 15
