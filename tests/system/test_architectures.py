"""Models of many architectures load by the same code and stream the output of `generate`."""

import asyncio

import numpy as np
import pytest

from headrace.oip.tensors import Tensor
from headrace_protos import inference_pb2, inference_pb2_grpc
from tests.random_models import greedy, save_random_model
from tests.system.calls import channel, generate, ids_request, infer, text_of

PROMPTS = [[5, 6, 7, 8], list(range(20, 52)), [300, 17, 1200, 44, 9, 81]]
LENGTH = 16
# Some of each runner; tests/model/test_zoo.py compares all with `generate`.
RUNNERS = {
    "llama": "paged",
    "opt": "paged",
    "qwen3": "paged",
    "gpt2": "paged",
    "t5": "ragged decoder",
    "bloom": "one row",
    "mamba": "one row, no cache",
    "bart": "one row",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, save_random_model(name, folder / name)) for name in RUNNERS}


@pytest.mark.full  # The short form: tests/model/test_zoo.py, and every other system test.
async def test_every_architecture_streams_the_output_of_generate(models, new_stack):
    sources = ",".join(f"{name}={folder}" for name, (folder, _) in models.items())
    stack = await new_stack(models=sources)

    async def generated(name, prompt):
        request = ids_request(
            name, Tensor("input_ids", "INT64", np.array(prompt)), max_tokens=LENGTH, min_tokens=LENGTH, temperature=0
        )
        outputs = await infer(stack.gateway, request, authority="predictor")
        return outputs["output_ids"].array.tolist()

    async def runner(name):
        async with channel(stack.gateway, "predictor") as open_channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(open_channel)
            response = await stub.ModelConfig(inference_pb2.ModelConfigRequest(name=name), timeout=30)
        return response.config.parameters["runner"].string_value

    for name, (_, model) in models.items():
        assert await runner(name) == RUNNERS[name]
        expected = [greedy(model, prompt, LENGTH) for prompt in PROMPTS]
        # Otherwise the comparison would also hold for models that repeat one token.
        assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
        assert any(len(set(ids)) > 4 for ids in expected)
        # Concurrently, so that their rows are batched.
        assert await asyncio.gather(*(generated(name, prompt) for prompt in PROMPTS)) == expected

        responses = await generate(
            stack.gateway, model=name, prompt="Once upon a time", max_tokens=8, ignore_eos=True, pace=20
        )
        assert len(responses) > 1
        assert responses[-1].usage.completion_tokens == 8
        assert isinstance(text_of(responses), str)
