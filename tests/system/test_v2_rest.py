"""V2 REST with Triton's extensions, through the gateway: tritonclient.http unmodified, and plain HTTP."""

import asyncio
import json
import shutil
import subprocess

import pytest
import pytest_asyncio

from tests.system.calls import rest
from tests.system.own_clients import client_passes
from tests.system.payload_log import records
from tests.waiting import until

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
        if at == request.parameters.get("fail_at"):
            raise RuntimeError("secret")
        yield {"row": row, "at": np.array([at])}
""",
    # Declares no tensors and cuts its INPUT into pieces.
    "chunks": """
import numpy as np

async def execute(request):
    text = request.inputs["INPUT"].ravel()[0].decode()
    size = request.parameters.get("size", 2)
    for start in range(0, len(text), size):
        yield {"OUTPUT": np.array([text[start:start + size]], dtype=object)}
""",
    # Yields 0, 1, 2 … for ever; each after the first one after a byte from the socket `gate`.
    "paced": """
import asyncio
import itertools
import numpy as np

async def execute(request):
    gate, writer = await asyncio.open_unix_connection(request.parameters["gate"])
    try:
        for i in itertools.count():
            if i:
                await gate.readexactly(1)
            yield {"i": np.array([i])}
    finally:
        writer.close()
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
    "sleeping": """
import asyncio

async def execute(request):
    await asyncio.sleep(3600)
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


async def test_curl_sends_json_and_reads_json(stack):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"id": "7", "inputs": [tensor("x", "INT64", [2, 2], [[1, 2], [3, 4]])]})
    command = [curl, "-sS", "-i", f"http://{stack.gateway}/v2/models/identity/versions/1/infer", "-d", body]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
    head, _, answer = done.stdout.partition("\n\n")
    assert " 200 " in head
    assert "content-type: application/json" in head.lower()
    assert json.loads(answer) == {
        "id": "7",
        "model_name": "identity",
        "model_version": "1",
        "outputs": [tensor("x", "INT64", [2, 2], [1, 2, 3, 4])],
    }


async def test_every_error_has_its_status_and_its_hop(stack):
    for method, path, status, hop, text in (
        ("POST", "/v2/models/nobody/infer", 404, "transformer", "no model 'nobody'"),
        ("POST", "/v2/models/identity/versions/9/infer", 404, "transformer", "version"),
        ("POST", "/v2/models/nobody/generate", 404, "transformer", "no model 'nobody'"),
        ("POST", "/v2/models/nobody/generate_stream", 404, "transformer", "no model 'nobody'"),
        ("GET", "/v2/models/nobody", 404, "transformer", "no model 'nobody'"),
        ("GET", "/v2/models/nobody/ready", 404, "transformer", "no model 'nobody'"),
        ("GET", "/v2/models/nobody/config", 404, "transformer", "no model 'nobody'"),
        ("POST", "/v2/models/failing/infer", 500, "predictor", "the model failed on this request"),
        ("POST", "/v2/models/failing/generate", 500, "predictor", "the model failed on this request"),
        ("POST", "/v2/models/failing/generate_stream", 500, "predictor", "the model failed on this request"),
        ("POST", "/v2/models/twice/infer", 400, "predictor", "more than one response"),
        ("POST", "/v2/models/twice/generate", 400, "predictor", "more than one response"),
        ("GET", "/v2/systemsharedmemory/status", 501, "transformer", "shared memory is not supported"),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501, "transformer", "shared memory is not supported"),
        ("POST", "/v2/xpusharedmemory/unregister", 501, "transformer", "shared memory is not supported"),
        ("GET", "/v2/nothing/status", 404, "transformer", "unknown path"),
    ):
        body = {} if "generate" in path else {"inputs": []}
        answer = await rest(stack.gateway, method, path, body if method == "POST" else None)
        assert (answer.status, answer.headers.get("x-failed-hop")) == (status, hop), (path, answer.body)
        assert list(answer.json) == ["error"], path
        assert text in answer.json["error"], path
        assert not any(name.startswith("grpc-") or name == "x-http-status" for name in answer.headers)


@pytest.mark.parametrize("nested", [False, True])
async def test_generate_answers_whole_and_generate_stream_in_pieces(stack, nested):
    options = {"max_tokens": 12, "seed": 5, "temperature": 0.7, "ignore_eos": True}
    body = {"text_input": "Once upon a time"} | ({"parameters": options} if nested else options)
    whole = await rest(stack.gateway, "POST", "/v2/models/storyteller/generate", body)
    assert whole.status == 200
    assert whole.headers["content-type"] == "application/json"
    assert (whole.json["model_name"], whole.json["model_version"]) == ("storyteller", "1")
    assert whole.json["finish_reason"] == "length"
    options["pace"] = 20  # Slow enough that even a busy machine sends separate pieces.
    body = {"text_input": "Once upon a time"} | ({"parameters": options} if nested else options)
    streamed = await rest(stack.gateway, "POST", "/v2/models/storyteller/versions/1/generate_stream", body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(event) for event in streamed.events]
    assert 1 < len(events) <= 12  # A slow reader gets larger pieces.
    assert "".join(event["text_output"] for event in events) == whole.json["text_output"]


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


async def test_an_error_after_the_first_event_is_an_event(stack):
    body = {"x": [[1, 2, 3], [4, 5, 6]], "fail_at": 1}
    answer = await rest(stack.gateway, "POST", "/v2/models/rows/generate_stream", body)
    assert answer.status == 200
    first, last = [json.loads(event) for event in answer.events]
    assert first["at"] == 0
    assert last == {"error": "the model failed on this request"}


class Gate:
    """The socket through which `paced` waits: counts the generators that have connected and disconnected."""

    def __init__(self):
        self.begun = self.ended = 0
        self.writer = None

    async def serve(self, reader, writer):
        self.begun += 1
        self.writer = writer
        await reader.read()
        self.ended += 1
        writer.close()


async def test_events_arrive_one_by_one_and_a_caller_that_leaves_stops_the_model(stack, tmp_path):
    gate = Gate()
    server = await asyncio.start_unix_server(gate.serve, tmp_path / "gate")
    host, _, port = stack.gateway.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"parameters": {"gate": str(tmp_path / "gate")}}).encode()
    head = f"POST /v2/models/paced/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(60):
        for i in range(20):
            # The next one is not generated before this one has arrived.
            event = await reader.readuntil(b"\n\n")
            assert json.loads(event[event.index(b"data: ") + 6 :])["i"] == i
            await until(lambda: gate.writer)  # The event may arrive before this loop has accepted the connection.
            gate.writer.write(b".")
        writer.close()
        await until(lambda: gate.ended == 1)
    server.close()


async def test_answered_and_refused_requests_are_recorded(stack):
    await rest(
        stack.gateway,
        "POST",
        "/v2/models/storyteller/generate",
        {"text_input": "Once", "max_tokens": 1, "id": "went-well"},
    )
    await infer(stack, "identity", b"{", x_request_id="went-wrong")
    (well,) = await records(stack.gateway, request_id="went-well")
    (wrong,) = await records(stack.gateway, request_id="went-wrong")
    assert (well.status, well.protocol, well.prompt) == ("OK", "headrace.rest.v1.OpenInference/Generate", "Once")
    assert (wrong.status, wrong.protocol) == ("INVALID_ARGUMENT", "headrace.rest.v1.OpenInference/Infer")
