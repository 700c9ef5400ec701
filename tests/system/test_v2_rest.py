"""V2 REST with Triton's extensions, through the gateway: tritonclient.http unmodified, and plain HTTP."""

import json

import pytest_asyncio

from tests.system.calls import rest
from tests.system.own_clients import client_passes

MODELS = {
    # Declares its tensors and sends a response for each row.
    "rows": """
import numpy as np
from headrace.errors import InvalidRequestError

INPUTS = {"x": ("FP32", [-1, 3])}

async def execute(request):
    if request.inputs["x"].shape[0] == 0:
        raise InvalidRequestError("no rows")
    for at, row in enumerate(request.inputs["x"]):
        yield {"row": row, "at": np.array([at])}
""",
    "twice": """
import numpy as np

async def execute(request):
    yield {"y": np.zeros(1)}
    yield {"y": np.zeros(1)}
""",
    "failing": """
async def execute(request):
    raise RuntimeError("secret")
""",
}


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models = {"storyteller": "models/storyteller", "identity": "models/identity"}
    for name, code in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(code)
        models[name] = folder / name
    async with stacks.use(models=",".join(f"{name}={where}" for name, where in models.items())) as started:
        yield started


def tensor(name, datatype, shape, data):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


async def infer(stack, model, body, **headers):
    return await rest(stack.gateway, "POST", f"/v2/models/{model}/infer", body, **headers)


async def test_tritons_http_clients_work_unchanged(stack):
    await client_passes("v2_rest", stack.gateway)


async def test_generate_maps_fields_to_the_tensors_of_a_relayed_model(stack):
    answer = await rest(stack.gateway, "POST", "/v2/models/rows/generate", {"x": [1, 2, 3], "id": "7"})
    assert answer.json == {"id": "7", "model_name": "rows", "model_version": "1", "row": [1.0, 2.0, 3.0], "at": 0}
    answer = await rest(stack.gateway, "POST", "/v2/models/rows/generate_stream", {"x": [[1, 2, 3], [4, 5, 6]]})
    events = [json.loads(event) for event in answer.events]
    assert [(event["at"], event["row"]) for event in events] == [(0, [1.0, 2.0, 3.0]), (1, [4.0, 5.0, 6.0])]
    answer = await rest(stack.gateway, "POST", "/v2/models/rows/generate", {"x": [1, 2]})
    assert (answer.status, answer.json["error"]) == (400, "input 'x': 2 elements do not fill the shape [-1, 3]")
    answer = await rest(stack.gateway, "POST", "/v2/models/rows/generate_stream", {"x": []})
    assert (answer.status, answer.json["error"], answer.headers["x-failed-hop"]) == (400, "no rows", "predictor")
