"""A stack whose predictor runs its model on vLLM: the engine process dies, and streams continue in the next one."""

import json
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.support.locust_page import check_report, locust_page
from tests.support.tool_models import save_tool_model
from tests.support.vllm import ARGUMENTS, PYTHON, check_engines, needs_vllm, token_ids, vllm_process
from tests.system.calls import rest
from tests.waiting import until

pytestmark = needs_vllm
START_S = 120  # Another process imports vLLM and loads the model.
FIELDS = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    environment = {
        "predictor": {
            "PREDICTOR_ENGINE": "vllm",
            "PREDICTOR_VLLM_PYTHON": str(PYTHON),
            "PREDICTOR_VLLM_ARGUMENTS": json.dumps(ARGUMENTS),
            "PREDICTOR_KV_CACHE_MEMORY": "64MiB",
            "PREDICTOR_DTYPE": "fp32",
        },
        "transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": str(START_S)},
    }
    # Beside it a model that vLLM does not serve.
    folder = save_tool_model(tmp_path_factory.mktemp("models") / "storyteller", "hermes")
    models = f"storyteller={folder},normalizer=models/normalizer"
    async with stacks.use(models=models, environment=environment) as stack:
        yield stack


def engine_of(stack):
    """The process with vLLM."""
    return vllm_process(stack.pid("predictor-0"))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 11, "structured_outputs": '{"regex": "([a-z]+, ){40}"}'},
    ],
    ids=["greedy", "sampled", "structured"],
)
async def test_a_stream_survives_the_kill_of_its_engine(stack, sampling):
    undisturbed = await token_ids(stack.gateway, 60, **FIELDS, **sampling)
    predictor, engine = stack.pid("predictor-0"), engine_of(stack)
    assert await token_ids(stack.gateway, 2 * START_S, engine.kill, pace=20, **FIELDS, **sampling) == undisturbed
    assert stack.pid("predictor-0") == predictor
    assert engine_of(stack) not in (None, engine)


async def test_a_tool_that_is_required_is_called(stack):
    schema = {"type": "object", "properties": {"fox": {"enum": ["red", "grey"]}}, "required": ["fox"]}
    tokens = Tokenizer.from_file(str(Path("models/storyteller/tokenizer.json"))).get_vocab()
    body = {
        "model": "storyteller",
        "messages": [{"role": "user", "content": "Find the fox."}],
        "tools": [{"type": "function", "function": {"name": "find", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1,
        # The model would never end JSON's whitespace, which may repeat with vLLM.
        "logit_bias": {str(token_id): -100 for text, token_id in tokens.items() if not text.strip("ĠĊĉč")},
    }
    answer = await rest(stack.gateway, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "find")
    assert json.loads(call["function"]["arguments"])["fox"] in ("red", "grey")
    refused = await rest(
        stack.gateway,
        "POST",
        "/v1/chat/completions",
        {**body, "tools": None, "tool_choice": None}
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": {"not": {}}},
            }
        },
    )
    assert refused.status == 400
    assert "Unimplemented keys" in refused.json["error"]["message"]


async def test_an_engine_that_dies_while_idle_is_replaced(stack):
    undisturbed = await token_ids(stack.gateway, 60, **FIELDS, temperature=0.0)
    engine = engine_of(stack)
    engine.kill()
    await until(lambda: engine_of(stack) not in (None, engine))
    assert await token_ids(stack.gateway, START_S, **FIELDS, temperature=0.0) == undisturbed


async def test_the_model_reports_its_engine_and_its_neighbour_keeps_its_own(stack):
    await check_engines(stack.gateway)


async def test_the_load_test_has_the_report_that_it_has_on_the_own_engine(stack):
    async with locust_page(stack) as page:
        await check_report(page, stack.gateway)
