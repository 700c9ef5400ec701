"""From a clean engine to an answer."""

import json
import subprocess
import uuid

from tests.containers.stack import ROOT

CODE = ROOT / "headrace" / "__init__.py"


def test_curl_streams(stack):
    fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 20, "ignore_eos": True, "pace": 50}
    body = json.dumps(fields | {"stream": True})
    command = ("curl", "-sSN", f"http://{stack.gateway}/v1/completions", "-d", body)
    with stack.timed("curl: 20 tokens as server-sent events"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data: {") >= 10
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_a_change_of_code_is_built_in_seconds(stack):
    before = CODE.read_bytes()
    try:
        CODE.write_bytes(before + f"\n# {uuid.uuid4()}\n".encode())
        with stack.timed("build after a change of code"):
            stack.compose("build")
    finally:
        CODE.write_bytes(before)
    assert stack.took("build after a change of code") <= 15
