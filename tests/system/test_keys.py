"""Keys before the whole stack: what each client may do on every protocol, and that a key is written nowhere."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace_protos import inference_pb2, millrace_pb2
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from millrace_protos.millrace_pb2_grpc import PayloadLogStub, TextGenerationStub
from runner.stack import Stack
from tests.support.stacks import StackPool
from tests.system.calls import channel, each, rest, text_request
from tests.waiting import until

KEYS = {
    name: "mr-" + secrets.token_urlsafe(32)
    for name in ("root", "alice", "bob", "stranger", "later", "metered", "monthly", "narrow")
}
METERED = 600  # Tokens in a minute.
ENTRIES: list[dict[str, Any]] = [
    {"name": "root", "key": KEYS["root"], "role": "admin"},
    {"name": "alice", "key": KEYS["alice"], "models": ["storyteller"]},
    {"name": "metered", "key": KEYS["metered"], "tokens_per_minute": METERED},
    {"name": "monthly", "key": KEYS["monthly"], "tokens_per_month": 5},
    {"name": "narrow", "key": KEYS["narrow"], "streams": 1},
    {"name": "bob", "key": KEYS["bob"], "models": ["normalizer"]},
]
STREAMS = 64
MODEL = "storyteller"
OK, DENIED, UNKNOWN = "OK", "PERMISSION_DENIED", "UNAUTHENTICATED"
TIMEOUT_S = 60
LOST_STATUS, MOST_ATTEMPTS = "Internal error from Core", 100

Headers = Mapping[str, str]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"} if name else {}


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries))
    new.replace(path)


@pytest_asyncio.fixture(scope="module")
async def keyed(stacks: StackPool, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stack, Path]]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, ENTRIES)
    started = await stacks.start({"gateway_keys": str(path)})
    yield started, path
    await stacks.stop(started)


async def status_of(call: Callable[[], Awaitable[Any]]) -> str:
    """The gRPC status of a call.

    grpc.aio loses the status of a call that is refused before its client has sent the first message, and reports an
    error of its own instead. Such a call is made again.
    """
    for _ in range(MOST_ATTEMPTS):
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            if error.details() != LOST_STATUS:
                return error.code().name
        else:
            return OK
    return LOST_STATUS


async def last_of(responses: Any) -> Any:
    return [response async for response in responses][-1:]


def grpc_calls(open_channel: grpc.aio.Channel, headers: Headers) -> dict[str, Callable[[], Awaitable[Any]]]:
    """A call of each kind, as a client sends it."""
    oip, text, log = (stub(open_channel) for stub in (GRPCInferenceServiceStub, TextGenerationStub, PayloadLogStub))
    health = health_pb2_grpc.HealthStub(open_channel)
    reflection = reflection_pb2_grpc.ServerReflectionStub(open_channel)
    options: dict[str, Any] = {"metadata": tuple(headers.items()), "timeout": TIMEOUT_S}
    # An error of one request becomes the status of the stream.
    in_status = options | {"metadata": (*headers.items(), ("triton_grpc_error", "true"))}
    request = text_request(MODEL, "Once", max_tokens=2)
    generation = millrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=2)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "unary": lambda: oip.ModelInfer(request, **options),
        "stream": lambda: last_of(text.Generate(generation, **options)),
        "both ways": lambda: last_of(oip.ModelStreamInfer(each(request), **in_status)),
        "health": lambda: health.Check(health_pb2.HealthCheckRequest(), **options),
        "reflection": lambda: last_of(reflection.ServerReflectionInfo(each(listing), **options)),
        "index": lambda: oip.RepositoryIndex(inference_pb2.RepositoryIndexRequest(), **options),
        "load": lambda: oip.RepositoryModelLoad(
            inference_pb2.RepositoryModelLoadRequest(model_name="normalizer"), **options
        ),
        "log settings": lambda: oip.LogSettings(inference_pb2.LogSettingsRequest(), **options),
        "payloads": lambda: last_of(log.Query(millrace_pb2.QueryPayloadsRequest(page_size=1), **options)),
    }


GRPC = {
    "": {"health": OK},
    "stranger": {"health": OK},
    "alice": {"load": DENIED, "log settings": DENIED},
    "bob": {"unary": DENIED, "stream": DENIED, "both ways": DENIED, "load": DENIED, "log settings": DENIED},
    "root": {},
}


@pytest.mark.parametrize("who", GRPC)
@pytest.mark.parametrize("port", ["gateway", "management"])
async def test_by_grpc(keyed: tuple[Stack, Path], who: str, port: str) -> None:
    stack, _ = keyed
    address = stack.gateway if port == "gateway" else f"127.0.0.1:{stack.settings.management_port}"
    otherwise = UNKNOWN if who in ("", "stranger") else OK
    async with channel(address) as open_channel:
        calls = grpc_calls(open_channel, bearer(who))
        seen = {name: await status_of(call) for name, call in calls.items()}
    assert seen == {name: GRPC[who].get(name, otherwise) for name in calls}


COMPLETION = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Once"]}
TEN_TOKENS = COMPLETION | {"max_tokens": 10, "ignore_eos": True}
REST: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/v1/completions", COMPLETION),
    "events": ("POST", "/v1/completions", COMPLETION | {"stream": True}),
    "infer": ("POST", f"/v2/models/{MODEL}/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 2}}),
    "generate": ("POST", f"/v2/models/{MODEL}/generate", {"text_input": "Once", "max_tokens": 2}),
    "lines": ("POST", "/millrace/v1/generate", COMPLETION),
    "models": ("GET", "/v1/models", None),
    "ready": ("GET", "/v2/health/ready", None),
    "playground": ("GET", "/", None),
    "load": ("POST", "/v2/repository/models/normalizer/load", {}),
    "log settings": ("GET", "/v2/logging", None),
    "payloads": ("GET", "/millrace/v1/payloads?page_size=1", None),
}
OPEN = {"ready": 200, "playground": 200}
ADMINS = {"load": 403, "log settings": 403}
ANSWERS = ("completion", "events", "infer", "generate", "lines")
STATUSES = {
    "": OPEN,
    "stranger": OPEN,
    "alice": ADMINS,
    "bob": ADMINS | dict.fromkeys(ANSWERS, 403),
    "root": {},
}


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("who", STATUSES)
async def test_by_rest(keyed: tuple[Stack, Path], who: str, header: str) -> None:
    stack, _ = keyed
    headers = bearer(who) if header == "authorization" else ({header: KEYS[who]} if who else {})
    otherwise = 401 if who in ("", "stranger") else 200
    for name, (method, path, body) in REST.items():
        answer = await rest(stack.gateway, method, path, body, **headers)
        assert (name, answer.status) == (name, STATUSES[who].get(name, otherwise)), answer.body


async def test_a_client_sees_the_models_alone_that_its_key_allows(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer("alice"))
    assert [card["id"] for card in answer.json["data"]] == [MODEL]
    for path in ("/v1/models/normalizer", "/v2/models/normalizer", "/v2/models/normalizer/config"):
        assert (await rest(stack.gateway, "GET", path, None, **bearer("alice"))).status == 403
        assert (await rest(stack.gateway, "GET", path, None, **bearer("root"))).status == 200
    index = await rest(stack.gateway, "POST", "/v2/repository/index", {}, **bearer("alice"))
    assert [model["name"] for model in index.json] == [MODEL]
    # The only one that it may use needs no name.
    assert (await rest(stack.gateway, "POST", "/v1/completions", {"prompt": "Once"}, **bearer("alice"))).status == 200


async def test_keys_change_under_streams(keyed: tuple[Stack, Path]) -> None:
    stack, path = keyed
    started = asyncio.Semaphore(0)

    async def stream(open_channel: grpc.aio.Channel) -> int:
        request = millrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=200, ignore_eos=True)
        metadata = tuple(bearer("alice").items())
        responses = TextGenerationStub(open_channel).Generate(request, metadata=metadata, timeout=TIMEOUT_S)
        tokens = 0
        async for response in responses:
            if tokens == 0:
                started.release()
            tokens += len(response.token_ids)
        return tokens

    async def refused(name: str) -> bool:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer(name))
        return bool(answer.status == 401)

    async with channel(stack.gateway) as open_channel:
        streams = [asyncio.create_task(stream(open_channel)) for _ in range(STREAMS)]
        try:
            for _ in streams:
                await asyncio.wait_for(started.acquire(), TIMEOUT_S)
            write(path, [*ENTRIES[:1], ENTRIES[1] | {"key": KEYS["later"]}])
            changed = time.monotonic()
            while not await refused("alice"):
                assert time.monotonic() - changed < 2
            assert not await refused("later")
            # A file that is no list of keys changes nothing.
            path.with_suffix(".new").write_text("- {name: alice")
            path.with_suffix(".new").replace(path)
            await until(lambda: "keys.yaml: is not YAML" in stack.log("transformer"))
            assert not await refused("later")
            assert await asyncio.gather(*streams) == [200] * STREAMS
        finally:
            write(path, ENTRIES)

            async def restored() -> bool:
                return not await refused("alice")

            await until(restored)


async def test_what_a_key_allows_in_a_minute_is_not_exceeded_by_many_callers(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    refusals: list[str] = []

    async def caller() -> int:
        tokens = 0
        for _ in range(20):
            answer = await rest(stack.gateway, "POST", "/v1/completions", TEN_TOKENS, **bearer("metered"))
            if answer.status == 200:
                tokens += answer.json["usage"]["total_tokens"]
            else:
                assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
                assert 1 <= int(answer.headers["retry-after"]) <= 61
                refusals.append(answer.json["error"]["message"])
        return tokens

    used = sum(await asyncio.gather(*(caller() for _ in range(20))))
    assert METERED - 50 < used <= METERED
    assert any("a minute metered has" in refusal for refusal in refusals)


async def test_the_month_of_a_key_is_that_of_the_log(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed

    async def statuses() -> list[int]:
        answers = [
            await rest(stack.gateway, "POST", "/v1/completions", TEN_TOKENS, **bearer("monthly")) for _ in range(2)
        ]
        return [answer.status for answer in answers]

    assert await statuses() == [200, 429]

    async def is_counted() -> bool:
        usage = await rest(stack.gateway, "GET", "/millrace/v1/usage?group=client", None, **bearer("monthly"))
        groups = usage.json.get("groups", [])
        return [(group["client"], group["completion_tokens"]) for group in groups] == [("monthly", "10")]

    await until(is_counted)


async def test_requests_of_a_key_at_once(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    request = millrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=500, ignore_eos=True)
    async with channel(stack.gateway) as open_channel:
        stub, options = TextGenerationStub(open_channel), {"metadata": tuple(bearer("narrow").items()), "timeout": 60}
        first = stub.Generate(request, **options)
        await first.read()
        assert await status_of(lambda: last_of(stub.Generate(request, **options))) == "RESOURCE_EXHAUSTED"
        first.cancel()

        async def is_free() -> bool:
            return await status_of(lambda: last_of(stub.Generate(request, **options))) == OK

        await until(is_free)


async def test_no_key_is_written_anywhere(keyed: tuple[Stack, Path]) -> None:
    stack, path = keyed
    for name in ("alice", "stranger"):
        for header in ({"x-api-key": KEYS[name]}, bearer(name)):
            await rest(stack.gateway, "POST", "/v1/completions", COMPLETION, **header)
            await rest(stack.gateway, "POST", "/v1/completions", {"model": 1}, **header)
    answer = await rest(stack.gateway, "GET", "/millrace/v1/payloads?page_size=1000", None, **bearer("root"))
    texts = {"payload log": answer.body.decode()}
    settings = stack.settings
    ports = (settings.transformer_metrics_port, *settings.predictor_metrics_ports, settings.logger_metrics_port)
    pages = [f"http://127.0.0.1:{port}/metrics" for port in ports]
    admin = f"http://127.0.0.1:{settings.gateway_admin_port}"
    for page in (*pages, f"{admin}/config_dump?include_eds", f"{admin}/stats"):
        texts[page] = await asyncio.to_thread(read_page, page)
    for file in stack.settings.run_folder.rglob("*"):
        if file.is_file() and file != path:
            texts[str(file)] = file.read_bytes().decode(errors="replace")
    assert '"client":"alice"' in texts["payload log"].replace(" ", "")
    assert len(texts) > 10
    assert [(place, name) for place, text in texts.items() for name, key in KEYS.items() if key in text] == []


def read_page(page: str) -> str:
    with urllib.request.urlopen(page, timeout=10) as response:
        return str(response.read().decode())
