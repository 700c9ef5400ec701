"""Keys before the whole stack: their models, their limits, and what counts toward them."""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.oip.tensors import Tensor
from headrace_protos import headrace_pb2
from headrace_protos.headrace_pb2_grpc import TextGenerationStub
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.support.runner_stack import Stack
from tests.support.stacks import StackFactory
from tests.system.calls import PACE, STREAMS, TIMEOUT_S, channel, each, ids_request, rest, text_request
from tests.system.keyed_stack import (
    COMPLETION,
    COUNTED,
    ENTRIES,
    FEW,
    KEYS,
    MODEL,
    OK,
    bearer,
    key_file,
    keyed,
    last_of,
    status_of,
    streams_of,
    write,
)
from tests.system.own_clients import client_passes
from tests.waiting import until

__all__ = ["key_file", "keyed"]

TEN_TOKENS = COMPLETION | {"max_tokens": 10, "ignore_eos": True}
WORDS = ("limit", "remaining", "reset")


def remaining_of(headers: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """An answer's headers for requests and tokens: limit, remaining, reset."""
    kinds = [kind for kind in ("requests", "tokens") if f"x-ratelimit-limit-{kind}" in headers]
    return {kind: tuple(headers[f"x-ratelimit-{word}-{kind}"] for word in WORDS) for kind in kinds}


TOKEN_KINDS = ("prompt_tokens", "completion_tokens")


async def test_a_client_sees_only_the_models_that_its_key_allows(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer("alice"))
    assert [card["id"] for card in answer.json["data"]] == [MODEL]
    other = "acme/normalizer"
    for path in (
        f"/v1/models/{other}",
        f"/v2/models/{other}",
        f"/v2/models/{other}/config",
        f"/v2/models/{other}/ready",
        f"/v2/models/{other}/stats",
        "/v2/models/acme%2Fnormalizer",
    ):
        assert (await rest(stack.gateway, "GET", path, None, **bearer("alice"))).status == 403
        for name in ("root", "grace"):
            assert (await rest(stack.gateway, "GET", path, None, **bearer(name))).status == 200
    index = await rest(stack.gateway, "POST", "/v2/repository/index", {}, **bearer("alice"))
    statistics = await rest(stack.gateway, "GET", "/v2/models/stats", None, **bearer("alice"))
    for models in (index.json, statistics.json["model_stats"]):
        assert [model["name"] for model in models] == [MODEL]
    # The only model that it may use needs no name.
    assert (await rest(stack.gateway, "POST", "/v1/completions", {"prompt": "Once"}, **bearer("alice"))).status == 200


async def test_keys_and_limits_change_during_streams(keyed: tuple[Stack, Path]) -> None:
    stack, path = keyed
    others = [entry for entry in ENTRIES if entry["name"] != "changing"]

    async def is_refused(name: str) -> bool:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer(name))
        return bool(answer.status == 401)

    async def limits_are(requests: int, tokens: int) -> bool:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, **bearer("changing"))
        if answer.status == 401:
            return False
        assert answer.status in (200, 429)
        seen = remaining_of(answer.headers)
        return (seen["requests"][0], seen["tokens"][0]) == (str(requests), str(tokens))

    async with channel(stack.gateway) as open_channel:
        streams = await streams_of("changing", open_channel, 100)
        try:
            assert await limits_are(1000, 100_000)
            # Less than the present streams use: the new limit applies to later calls.
            for requests, tokens, allowed in ((1, 10, False), (2000, 200_000, True)):
                limits = {"requests_per_minute": requests, "tokens_per_minute": tokens}
                write(path, [*others, {"name": "changing", "key": KEYS["changing"]} | limits])
                await until(partial(limits_are, requests, tokens))
                running = sum(not stream.done() for stream in streams)
                print(f"{requests} requests and {tokens} tokens a minute, with {running} streams")
                assert running > 0
                answer = await rest(stack.gateway, "POST", "/v1/completions", TEN_TOKENS, **bearer("changing"))
                assert (answer.status == 200) is allowed, answer.body
            # Another key for the same client, and then a malformed file, which changes nothing.
            write(path, [*others, {"name": "changing", "key": KEYS["later"]}])
            await until(lambda: is_refused("changing"))  # How soon: tests/process/test_gateway_access.py.
            path.with_suffix(".new").write_text("- {name: changing")
            path.with_suffix(".new").replace(path)
            await until(lambda: "keys.yaml: is not YAML" in stack.log("transformer"))
            assert not await is_refused("later")
            assert await asyncio.gather(*streams) == [100] * STREAMS
        finally:
            write(path, ENTRIES)
            await until(lambda: limits_are(1000, 100_000))


async def test_openais_own_client_sees_the_remaining_limits_and_the_retry_delay(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    await client_passes("openai_limits", stack.gateway, KEYS["few"], FEW, KEYS["counted"], *COUNTED)


async def test_a_keys_monthly_tokens_are_those_of_the_log(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed

    async def statuses() -> list[int]:
        answers = [
            await rest(stack.gateway, "POST", "/v1/completions", TEN_TOKENS, **bearer("monthly")) for _ in range(2)
        ]
        return [answer.status for answer in answers]

    assert await statuses() == [200, 429]

    async def is_counted() -> bool:
        usage = await rest(stack.gateway, "GET", "/headrace/v1/usage?group=client", None, **bearer("monthly"))
        groups = usage.json.get("groups", [])
        return [(group["client"], group["completion_tokens"]) for group in groups] == [("monthly", "10")]

    await until(is_counted)


async def test_requests_in_flight_of_a_key_are_limited(keyed: tuple[Stack, Path]) -> None:
    stack, _ = keyed
    request = headrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=4)
    lasting = headrace_pb2.GenerateRequest(model=MODEL, prompt="Once", max_tokens=500, ignore_eos=True, pace=PACE)
    async with channel(stack.gateway) as open_channel:
        stub, options = TextGenerationStub(open_channel), {"metadata": tuple(bearer("narrow").items()), "timeout": 60}
        first = stub.Generate(lasting, **options)
        await first.read()
        assert await status_of(lambda: last_of(stub.Generate(request, **options))) == "RESOURCE_EXHAUSTED"
        first.cancel()
        await until(lambda: status_of(lambda: last_of(stub.Generate(request, **options))), holds=OK.__eq__)


# Each takes up to 40 tokens: the path, the body with `{n}` for how many, and the model.
WAYS_BY_REST: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Once", "max_tokens": 39}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}),
    "choices": ("/v1/completions", {"prompt": "Once", "max_tokens": 10, "n": 3}),
    "responses": ("/v1/responses", {"input": "Once", "max_output_tokens": 30}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}),
    "events": (f"/v2/models/{MODEL}/generate_stream", {"text_input": "Once", "max_tokens": 39}),
    "lines": ("/headrace/v1/generate", {"prompt": "Once", "max_tokens": 39}),
    "embeddings": ("/v1/embeddings", {"model": "embedder", "input": ["the fox sat on a mat"] * 4}),
}
TOKENS = 120
AT_ONCE = 8


async def test_no_way_to_tokens_leads_past_the_limit_of_a_key(new_stack: StackFactory, tmp_path: Path) -> None:
    save_random_encoder("bert", tmp_path / "embedder")
    save_words_tokenizer(tmp_path / "embedder", "the", "fox", "sat", "on", "a", "mat")
    ways_by_grpc = {
        "text tensors": text_request(MODEL, "Once", max_tokens=39),
        "ids to vectors": ids_request("embedder", Tensor("input_ids", "INT64", np.arange(4, 8).repeat(10))),
        "ids to tokens": ids_request(MODEL, Tensor("input_ids", "INT64", np.arange(4, 8)), max_tokens=36),
    }
    ways = [*WAYS_BY_REST, *(f"{way} {kind}" for way in ways_by_grpc for kind in ("unary", "stream", "predictor"))]
    keys = {way.replace(" ", "-"): f"hr-{way:_<32}".replace(" ", "-") for way in [*ways, "single"]}
    entries = [{"name": name, "key": key, "tokens_per_minute": TOKENS} for name, key in keys.items()]
    write(tmp_path / "keys.yaml", entries)
    models = f"{MODEL}=models/{MODEL},embedder={tmp_path / 'embedder'}"
    stack = await new_stack(models=models, gateway_keys=str(tmp_path / "keys.yaml"))

    async def used(name: str) -> int:
        headers = {"authorization": f"Bearer {keys[name]}"}
        answer = await rest(stack.gateway, "GET", "/headrace/v1/usage?group=client", None, **headers)
        groups = answer.json.get("groups", [])
        return sum(int(group[kind]) for group in groups for kind in TOKEN_KINDS if kind in group)

    async def charged(name: str) -> int:
        answer = await rest(stack.gateway, "GET", "/v1/models", None, authorization=f"Bearer {keys[name]}")
        return TOKENS - int(answer.headers["x-ratelimit-remaining-tokens"])

    refused: dict[str, list[Any]] = {}
    for way, (path, body) in WAYS_BY_REST.items():
        fields = {"model": MODEL, "ignore_eos": True} | body
        for unknown in {"events": ("model", "ignore_eos"), "responses": ("ignore_eos",)}.get(way, ()):
            fields.pop(unknown)
        headers = {"authorization": f"Bearer {keys[way]}"}
        answers = await asyncio.gather(*(rest(stack.gateway, "POST", path, fields, **headers) for _ in range(AT_ONCE)))
        refused[way] = [answer.status for answer in answers if answer.status != 200]
        assert set(refused[way]) == {429}, (way, answers[0].body)
    async with channel(stack.gateway) as plain, channel(stack.gateway, "predictor") as at_predictor:
        for way, request in ways_by_grpc.items():
            for kind in ("unary", "stream", "predictor"):
                name = f"{way} {kind}".replace(" ", "-")
                stub = GRPCInferenceServiceStub(at_predictor if kind == "predictor" else plain)
                metadata = (("authorization", f"Bearer {keys[name]}"), ("triton_grpc_error", "true"))
                options: dict[str, Any] = {"metadata": metadata, "timeout": TIMEOUT_S}

                async def call(
                    stub: Any = stub, request: Any = request, kind: str = kind, options: dict[str, Any] = options
                ) -> Any:
                    if kind == "unary":
                        return await stub.ModelInfer(request, **options)
                    return await last_of(stub.ModelStreamInfer(each(request), **options))

                refused[name] = list(await asyncio.gather(*(status_of(call) for _ in range(AT_ONCE))))
    for name, statuses in refused.items():
        if name.endswith("predictor"):
            assert set(statuses) == {"PERMISSION_DENIED"}, name
        elif name.startswith("ids-to-tokens"):  # The transformer's model has text.
            assert set(statuses) == {"INVALID_ARGUMENT"}, name
        elif name not in WAYS_BY_REST:
            assert set(statuses) == {OK, "RESOURCE_EXHAUSTED"}, (name, statuses)

    async def unlogged() -> dict[str, tuple[int, int]]:
        """The tokens that are logged and those that are charged, where they differ."""
        tokens = {name: (await used(name), await charged(name)) for name in refused}
        return {name: both for name, both in tokens.items() if both[0] != both[1]}

    body = {"model": MODEL, "prompt": ["Once upon a time", "Once"], "max_tokens": 10, "n": 3, "ignore_eos": True}
    single = await rest(stack.gateway, "POST", "/v1/completions", body, authorization=f"Bearer {keys['single']}")
    refused["single"] = []

    with suppress(AssertionError):  # The next line says what differs.
        await until(lambda: _is_empty(unlogged()))
    assert not await unlogged()
    for name in refused:
        if name == "single":  # The tokens of each prompt count once for its choices.
            assert await charged(name) == single.json["usage"]["total_tokens"]
        assert (0 if "to-tokens" in name or name.endswith("predictor") else 20) <= await used(name) <= TOKENS, name


async def _is_empty(differences: Awaitable[dict[str, tuple[int, int]]]) -> bool:
    return not await differences
