"""Adapters through the whole stack: models of their own by every path, loaded at run time, whose streams survive."""

import asyncio
import sys

import grpc
import psutil

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.random_adapters import save_random_adapter
from tests.random_models import save_random_model
from tests.system.calls import channel, generate, rest

FIELDS = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def ids_of(responses):
    return [token for response in responses for token in response.token_ids]


async def test_adapters_beside_their_base_loaded_at_run_time_and_a_killed_engine(new_stack, tmp_path):
    base = save_random_model("llama", tmp_path / "llama")
    for seed, name in enumerate(("poet", "cook"), 1):
        save_random_adapter(tmp_path / name, base, str(tmp_path / "llama"), seed)
    (tmp_path / "cook" / "chat_template.jinja").write_text("{{ messages[0]['content'] }} and cook, cook and cook!")
    stack = await new_stack(
        models=",".join(f"{name}={tmp_path / folder}" for name, folder in (("base", "llama"), ("poet", "poet"))),
        commands={"predictor": (sys.executable, "-m", "tests.system.slow_predictor")},
        environment={
            "predictor": {"SLOW_MS": "20", "PREDICTOR_MODEL_REPOSITORY": str(tmp_path)},
            "transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": "100"},
        },
    )
    assert (await rest(stack.gateway, "POST", "/v2/repository/models/cook/load", {})).status == 200
    cards = {card["id"]: card for card in (await rest(stack.gateway, "GET", "/v1/models")).json["data"]}
    assert {name: cards[name].get("parent") for name in ("base", "poet", "cook")} == {
        "base": None,
        "poet": "base",
        "cook": "base",
    }
    assert len({cards[name]["fingerprint"] for name in ("base", "poet", "cook")}) == 3

    names = ("base", "poet", "cook")
    answers = await asyncio.gather(*(generate(stack.gateway, model=name, **FIELDS) for name in names))
    expected = dict(zip(names, map(ids_of, answers), strict=True))
    assert len(expected["poet"]) == 40
    assert len({tuple(ids) for ids in expected.values()}) == 3

    # The base's tokenizer and template, where the adapter has none of its own.
    async def chat(name):
        answer = await rest(stack.gateway, "POST", "/v1/chat/completions", {"model": name, **CHAT})
        return answer.json["usage"]["prompt_tokens"]

    assert await chat("cook") > await chat("poet") == await chat("base")

    # All streams of the engine continue in the next one, with the same tokens.
    (host,) = psutil.Process(stack.pid("predictor-0")).children()
    engines = {child.pid for child in host.children()}
    assert len(engines) == 1
    killing = asyncio.Semaphore(0)

    async def stream(name):
        ids = []
        async with channel(stack.gateway) as open_channel:
            request = headrace_pb2.GenerateRequest(model=name, **FIELDS)
            call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=120)
            while (response := await call.read()) is not grpc.aio.EOF:
                if not ids:
                    killing.release()
                ids += response.token_ids
        return ids

    streams = {name: asyncio.create_task(stream(name)) for name in ("poet", "base", "cook")}
    for _ in streams:
        await killing.acquire()
    for child in host.children():
        child.kill()
    for name, task in streams.items():
        assert await task == expected[name]

    unloaded = await rest(stack.gateway, "POST", "/v2/repository/models/base/unload", {})
    assert unloaded.status == 400
    assert "base of the adapters poet, cook" in unloaded.json["error"]
    body = {"parameters": {"unload_dependents": True}}
    assert (await rest(stack.gateway, "POST", "/v2/repository/models/base/unload", body)).status == 200
    refused = await rest(stack.gateway, "POST", "/v1/completions", {"model": "cook", "prompt": "Hello"})
    assert refused.status == 404
