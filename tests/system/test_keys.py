"""Keys before the whole stack: the models that they allow, and keys that change while streams run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_runner.stack import Stack
from tests.system.calls import STREAMS, channel, rest
from tests.system.keyed_stack import ENTRIES, KEYS, MODEL, bearer, key_file, keyed, streams_of, write
from tests.waiting import until

__all__ = ["key_file", "keyed"]


async def test_a_client_sees_only_the_models_that_its_key_allows(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer("alice"))
    assert [card["id"] for card in answer.json["data"]] == [MODEL]
    other = "acme/normalizer"
    for path in (
        f"/v1/models/{other}",
        f"/v2/models/{other}",
        f"/v2/models/{other}/config",
        "/v2/models/acme%2Fnormalizer",
    ):
        assert (await rest(stack.gateway, "GET", path, None, **bearer("alice"))).status == 403
        for name in ("root", "grace"):
            assert (await rest(stack.gateway, "GET", path, None, **bearer(name))).status == 200
    index = await rest(stack.gateway, "POST", "/v2/repository/index", {}, **bearer("alice"))
    assert [model["name"] for model in index.json] == [MODEL]
    # The only model that it may use needs no name.
    assert (await rest(stack.gateway, "POST", "/v1/completions", {"prompt": "Once"}, **bearer("alice"))).status == 200


async def test_keys_change_during_streams(keyed: tuple[Stack, Path]) -> None:
    stack, path = keyed

    async def refused(name: str) -> bool:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer(name))
        return bool(answer.status == 401)

    async with channel(stack.gateway) as open_channel:
        streams = await streams_of("alice", open_channel, 80)
        try:
            write(path, [*ENTRIES[:1], ENTRIES[1] | {"key": KEYS["later"]}])
            await until(lambda: refused("alice"))  # How soon: tests/process/test_gateway_access.py.
            assert not await refused("later")
            # A malformed file changes nothing.
            path.with_suffix(".new").write_text("- {name: alice")
            path.with_suffix(".new").replace(path)
            await until(lambda: "keys.yaml: is not YAML" in stack.log("transformer"))
            assert not await refused("later")
            assert await asyncio.gather(*streams) == [80] * STREAMS
        finally:
            write(path, ENTRIES)

            async def restored() -> bool:
                return not await refused("alice")

            await until(restored)
