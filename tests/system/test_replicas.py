"""Several predictors share the work; one that is killed is missed by nobody for long, and comes back."""

import asyncio

from millrace_protos import inference_pb2 as pb
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, generate, rest, statistics
from tests.waiting import until

MODELS = "storyteller=models/storyteller"


async def test_work_is_shared_and_a_killed_predictor_comes_back(new_stack):
    stack = await new_stack(predictors=2, models=MODELS)

    async def tell():
        return await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=20, ignore_eos=True)

    async def both_work():
        # The gateway probes each of them once a second: it may know of the second one a little later than of the first.
        await asyncio.gather(*(tell() for _ in range(16)))
        told = [await statistics(stack.addresses[f"predictor-{i}"], "storyteller") for i in range(2)]
        return all(model.inference_count > 0 for model in told)

    await until(both_work)

    killed = stack.pid("predictor-0")
    streams = [asyncio.create_task(tell()) for _ in range(8)]
    await stack.kill("predictor-0")
    # A stream on the dead predictor goes on at the other one.
    for responses in await asyncio.gather(*streams):
        assert responses[-1].usage.completion_tokens == 20

    # The other one serves while the first is away.
    assert await tell()
    await stack.wait_ready(timeout_s=90)
    assert stack.pid("predictor-0") != killed
    assert await tell()

    # What is loaded and unloaded by the predictors' own name concerns each of them too.
    async def states():
        told = set()
        for i in range(2):
            async with channel(stack.addresses[f"predictor-{i}"]) as own:
                index = await GRPCInferenceServiceStub(own).RepositoryIndex(pb.RepositoryIndexRequest())
                told |= {model.state for model in index.models}
        return told

    async with channel(stack.gateway, "predictor") as open_channel:
        stub = GRPCInferenceServiceStub(open_channel)
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="storyteller"), timeout=60)
        assert await states() == {"UNAVAILABLE"}
        assert (await rest(stack.gateway, "GET", "/v2/models/storyteller/ready")).status == 404
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="storyteller"), timeout=60)
        assert await states() == {"READY"}
    assert await tell()


async def test_without_a_predictor_the_answer_is_503_once_the_wait_is_over(new_stack):
    stack = await new_stack(models=MODELS, environment={"transformer": {"TRANSFORMER_PREDICTOR_WAIT": "0.2"}})
    await stack.kill("predictor-0")
    answer = await rest(stack.gateway, "POST", "/v1/completions", {"model": "storyteller", "prompt": "Once"})
    assert answer.status == 503
    assert answer.headers["x-failed-hop"] == "predictor"
    assert answer.pieces[-1][0] < 5
    ready = await rest(stack.gateway, "GET", "/v2/health/ready")
    assert (ready.status, ready.json) in ((503, {"ready": False}), (200, {"ready": True}))
    assert (await rest(stack.gateway, "GET", "/health")).status in (503, 200)

    async def ready_again():
        return (await rest(stack.gateway, "GET", "/v2/health/ready")).status == 200

    await stack.wait_ready(timeout_s=30)
    await until(ready_again)
    assert await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=3)
    # The only model need not be named.
    for body in ({"prompt": "Once"}, {"prompt": "Once", "model": ""}):
        answer = await rest(stack.gateway, "POST", "/v1/completions", {**body, "max_tokens": 2})
        assert (answer.status, answer.json["model"]) == (200, "storyteller")
    assert (await rest(stack.gateway, "GET", "/tokenizer_info")).json["eos_token"] == "</s>"
