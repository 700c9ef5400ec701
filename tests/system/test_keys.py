"""Keys before the whole stack: what each client may do on every protocol, and that a key is written nowhere."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import pytest

from runner.stack import Stack
from tests.system.calls import channel, rest
from tests.system.keyed_stack import (
    COMPLETION,
    DENIED,
    ENTRIES,
    KEYS,
    MODEL,
    OK,
    REST,
    STREAMS,
    UNKNOWN,
    bearer,
    begun_streams,
    grpc_calls,
    key_file,
    keyed,
    status_of,
    write,
)
from tests.waiting import until

__all__ = ["key_file", "keyed"]

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

    async def refused(name: str) -> bool:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer(name))
        return bool(answer.status == 401)

    async with channel(stack.gateway) as open_channel:
        streams = await begun_streams(open_channel, "alice", 200)
        try:
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
