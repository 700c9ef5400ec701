"""An inference gateway's endpoint picker finds each pod's true load on its page, by vLLM's names."""

import asyncio
import shutil
import subprocess
import sys
import time
import urllib.request

from headrace.telemetry.page import PICKERS_PATH
from tests.prometheus import read_page
from tests.random_adapters import save_random_adapter
from tests.random_models import save_random_model
from tests.support.scripted_engine import ScriptedEngine
from tests.system.calls import generate, rest
from tests.waiting import until

CALLS, PLACES = 5, 2
RUNNING, WAITING, USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
CACHE, ADAPTERS = "vllm:cache_config_info", "vllm:lora_requests_info"
IDLE, BUSY = {RUNNING: 0, WAITING: 0}, {RUNNING: PLACES, WAITING: CALLS - PLACES}


def picked(port):
    """The samples of a picker's page by their names, of the model `base` or `chat`."""
    page = read_page(port, PICKERS_PATH)
    return {sample.name: sample for sample in page if sample.labels.get("model_name") != "storyteller"}


def has(port, expected):
    found = {name: sample.value for name, sample in picked(port).items()}
    return found.items() >= expected.items()


def own(port, name):
    return next(sample.value for sample in read_page(port) if sample.name == f"headrace_{name}")


async def test_pages_agree_with_our_own_metrics_under_load(new_stack, tmp_path):
    base = save_random_model("llama", tmp_path / "llama")
    for number, name in enumerate(("poet", "cook")):
        save_random_adapter(tmp_path / name, base, str(tmp_path / "llama"), number)
    limits = {"PREDICTOR_MAX_RUNNING": str(PLACES), "PREDICTOR_MAX_ADAPTERS": "4"}
    stack = await new_stack(
        models=f"base={tmp_path / 'llama'}",
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": limits | {"PREDICTOR_MODEL_REPOSITORY": str(tmp_path)}},
    )
    predictor, transformer = (stack.metrics_pages[kind][0][1] for kind in ("predictor", "transformer"))
    assert has(predictor, IDLE | {USAGE: 0, CACHE: 1})
    size = picked(predictor)[CACHE].labels
    facts = (await rest(stack.gateway, "GET", "/v2/models/base/config")).json["parameters"]
    blocks = int(size["num_gpu_blocks"]) + 1  # One is never allocated.
    assert (size["model_name"], size["block_size"]) == ("base", "32")
    assert int(facts["cache_bytes"]["string_value"]) % (blocks * 32) == 0 < blocks - 10

    fields = {"model": "base", "prompt": "Once upon a time", "max_tokens": 80, "ignore_eos": True}
    calls = [asyncio.create_task(generate(stack.gateway, **fields)) for _ in range(CALLS)]
    for port in (predictor, transformer):
        await until(lambda port=port: has(port, BUSY))
        assert 0 < picked(port)[USAGE].value < 1
    assert own(predictor, "sequences_running") == PLACES
    assert own(predictor, "sequences_waiting") == CALLS - PLACES
    usages = (
        picked(predictor)[USAGE].value,
        own(predictor, "kv_cache_utilization_ratio"),
        picked(predictor)[USAGE].value,
    )
    assert usages == tuple(sorted(usages))
    await asyncio.gather(*calls)
    for port in (predictor, transformer):
        await until(lambda port=port: has(port, IDLE | {USAGE: 0}))

    for path, adapters in (("poet/load", "poet"), ("cook/load", "cook,poet"), ("poet/unload", "cook")):
        assert (await rest(stack.gateway, "POST", f"/v2/repository/models/{path}", {})).status == 200
        sample = picked(predictor)[ADAPTERS]
        assert sample.labels == {"max_lora": "4", "running_lora_adapters": adapters, "waiting_lora_adapters": ""}
        assert abs(sample.value - time.time()) < 60
    cards = (await rest(stack.gateway, "GET", "/v1/models")).json["data"]
    assert {card["id"]: card.get("parent") for card in cards} == {"base": None, "cook": "base"}
    unload = "/v2/repository/models/base/unload"
    refused = await rest(stack.gateway, "POST", unload, {})
    assert (refused.status, "base of the adapters cook" in refused.json["error"]) == (400, True)
    for port in (predictor, transformer):
        assert {sample.name for sample in read_page(port)} > picked(port).keys() >= {RUNNING, WAITING, USAGE, ADAPTERS}
        check(port)
    assert (await rest(stack.gateway, "POST", unload, {"parameters": {"unload_dependents": True}})).status == 200


def check(port):
    """Prometheus' own tool reads the page, where the machine has it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        page = answer.read()
    assert f"# TYPE {WAITING} gauge\n".encode() in page
    if shutil.which("promtool"):
        # 3: its lint keeps colons for the results of rules; 1 would be a page that it cannot read.
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
        assert done.returncode in (0, 3), done.stderr


async def test_a_transformer_before_engines_has_their_requests_and_those_that_wait_for_a_place(stacks, tmp_path):
    engines = tmp_path / "engines.yaml"
    async with ScriptedEngine("models/storyteller") as engine:
        address = f"http://127.0.0.1:{engine.port}/openai/v1"
        engines.write_text(f"chat: {{addresses: ['{address}'], tokenizer: models/storyteller, max_running: {PLACES}}}")
        settings = {"TRANSFORMER_ENGINES": str(engines)}
        async with stacks.use(models="storyteller=models/storyteller", environment={"transformer": settings}) as stack:
            ((_, port, _),) = stack.metrics_pages["transformer"]
            body = {"model": "chat", "prompt": "Once", "max_tokens": 6}
            await until(lambda: has(port, IDLE))
            engine.delay_s = 0.3
            calls = [asyncio.create_task(rest(stack.gateway, "POST", "/v1/completions", body)) for _ in range(CALLS)]
            await until(lambda: has(port, BUSY))
            assert {answer.status for answer in await asyncio.gather(*calls)} == {200}
            await until(lambda: has(port, IDLE))
