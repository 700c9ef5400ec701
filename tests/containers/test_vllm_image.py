"""The predictor's image with vLLM, built and started by the files that docs/engines.md names."""

import json
import re

import pytest

from tests.containers.stack import BASE_IMAGE, FILES, PROJECT, ComposeStack, docker, size_mb
from tests.support.vllm import check_engines, token_ids, vllm_process
from tests.system.calls import generate, text_of
from tests.waiting import until

pytestmark = pytest.mark.full  # The short form: test_compose_files.py.

START_S = 300  # A process imports vLLM and loads the models, on the cores that the others start on.
GREEDY = {
    "model": "storyteller",
    "prompt": "Once upon a time",
    "temperature": 0.0,
    "max_tokens": 60,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def vllm(built, tmp_path_factory):
    """Beside the other tests' stack, of which it shares the images but the predictor's."""
    files = (*FILES, "deploy/compose/vllm.yaml")
    stack = ComposeStack(tmp_path_factory.mktemp("wheelhouse"), files, f"{PROJECT}-vllm")
    stack.environment |= {
        "MODELS": "storyteller=models/storyteller,normalizer=models/normalizer",
        "PREDICTOR_DTYPE": "fp32",
        "PREDICTOR_KV_CACHE_MEMORY": "64MiB",
        "TRANSFORMER_PREDICTOR_START_WAIT": str(START_S),
    }
    with built.timed("build with vLLM (only what the engine has cached is not new)"):
        stack.compose("build", "predictor")
    built.sizes["predictor with vLLM"] = size_mb("headrace-predictor:test-vllm") - size_mb(BASE_IMAGE)
    try:
        with built.timed("up --wait with vLLM"):
            stack.compose("up", "--wait", "--no-build", "envoy")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans")


def engine_of(stack):
    return vllm_process(stack.container("predictor").facts["State"]["Pid"])


async def test_the_decoder_runs_on_vllm_and_the_encoder_decoder_beside_it(vllm):
    await check_engines(vllm.gateway)


async def test_a_stream_survives_the_kill_of_vllms_process(vllm):
    undisturbed = await token_ids(vllm.gateway, START_S, **GREEDY)
    assert len(undisturbed) == GREEDY["max_tokens"]
    container, engine = vllm.container("predictor"), engine_of(vllm)
    assert await token_ids(vllm.gateway, START_S, engine.kill, pace=20, **GREEDY) == undisturbed
    await until(lambda: engine_of(vllm) not in (None, engine))
    assert container.facts["RestartCount"] == 0


async def test_an_answer_follows_its_form(vllm):
    form = "([a-z]{2,5}, ){4}"
    fields = GREEDY | {"structured_outputs": json.dumps({"regex": form}), "ignore_eos": False}
    responses = await generate(vllm.gateway, **fields)
    assert re.fullmatch(form, text_of(responses)), text_of(responses)


def test_the_container_has_the_least_privileges(vllm):
    facts = vllm.container("predictor").facts
    assert facts["Config"]["User"] == "headrace"
    assert facts["HostConfig"]["ReadonlyRootfs"]
    assert facts["HostConfig"]["CapDrop"] == ["ALL"]
    assert facts["HostConfig"]["PidsLimit"] == 1024
    assert facts["HostConfig"]["ShmSize"] == 1 << 30


def test_the_image_has_vllm_in_its_own_environment_only(vllm):
    script = (
        "import importlib.util as u; print(*(m for m in ('vllm', 'triton', 'sqlalchemy', 'pip') if u.find_spec(m)))"
    )
    predictor = vllm.container("predictor").id
    assert docker("exec", predictor, "python", "-c", script).split() == []
    assert docker("exec", predictor, "/venv-vllm/bin/python", "-c", script).split() == ["vllm"]
