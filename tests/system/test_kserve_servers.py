"""KServe's servers beside ours: its transformers before our predictor and gateway, ours before its model server.

KServe's servers are started with the arguments that its controller and its users give them: `--model_name`,
`--predictor_host`, `--predictor_protocol`, `--http_port`.
"""

import asyncio
import socket
import subprocess
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path

import grpc
import numpy as np
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc
from tests.support.status import code_of, refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import rest
from tests.system.own_clients import python_of
from tests.waiting import until

SCRIPTS = Path(__file__).parents[1] / "kserve"
NUMBERS = {"id": "r", "inputs": [{"name": "n", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}


@asynccontextmanager
async def kserve(script, **arguments):
    """A KServe server that answers; its addresses of REST and gRPC."""
    with ExitStack() as held:
        sockets = [held.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(2)]
        http_port, grpc_port = (each.getsockname()[1] for each in sockets)
    given = {"http_port": http_port, "grpc_port": grpc_port, **arguments}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value)) if part]
    command = (python_of(".venv-kserve"), str(SCRIPTS / script), *flags)
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def answers():
        assert server.returncode is None
        try:
            return (await rest(f"127.0.0.1:{http_port}", "GET", "/v2/health/live")).status == 200
        except OSError:
            return False

    try:
        await until(answers)
        yield f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()


@pytest_asyncio.fixture(scope="module")
async def identity(stacks):
    python_of(".venv-kserve")
    async with stacks.use(models="identity=models/identity") as stack:
        yield stack


@pytest_asyncio.fixture(scope="module")
async def model_server():
    """The gRPC address of KServe's model server with the model `echo`."""
    async with kserve("server.py", model_name="echo") as (_, by_grpc):
        yield by_grpc


@pytest_asyncio.fixture(scope="module")
async def kserves_transformers(identity):
    """Transformers of KServe before the predictor by gRPC and before the gateway by REST."""
    given = {"model_name": "identity,nobody", "enable_predictor_health_check": ""}
    before = (("grpc-v2", identity.addresses["predictor-0"]), ("v2", identity.gateway))
    async with AsyncExitStack() as running:
        starts = (
            running.enter_async_context(
                kserve("model_transformer.py", predictor_host=host, predictor_protocol=protocol, **given)
            )
            for protocol, host in before
        )
        yield await asyncio.gather(*starts)


async def test_kserves_transformers_serve_in_front_of_the_predictor_and_of_the_gateway(kserves_transformers):
    for http, by_grpc in kserves_transformers:

        async def get(path, http=http):
            return (await rest(http, "GET", f"/v2/{path}")).status

        # They ask their predictor.
        assert await get("health/ready") == 200
        assert await get("models/identity/ready") == 200
        assert await get("models/nobody/ready") == 503
        answer = await rest(http, "POST", "/v2/models/identity/infer", NUMBERS)
        assert (answer.status, answer.json["id"], answer.json["outputs"][0]["data"]) == (200, "r", [4, 6])
        refused = await rest(http, "POST", "/v2/models/nobody/infer", NUMBERS)
        assert "no model 'nobody'" in refused.body.decode()  # KServe's status is 500 for every failure of a predictor.
        async with grpc.aio.insecure_channel(by_grpc) as channel:
            request = pb.ModelInferRequest(model_name="identity", id="g")
            add_input(request, Tensor("n", "FP32", np.array([1, 2], dtype=np.float32)))
            answer = await inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert (answer.id, decode_outputs(answer)["y"].array.tolist()) == ("g", [4, 6])


async def test_the_transformer_serves_in_front_of_kserves_model_server(model_server):
    async with transformer(model_server, models="echo=models/identity", ready=False) as (stub, catalogue):
        await until(lambda: catalogue.ready)
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        assert (await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))).name == "echo"
        request = pb.ModelInferRequest(model_name="echo", id="r")
        tensors = (
            Tensor("f", "FP32", np.arange(40_000, dtype=np.float32).reshape(200, 200)),
            Tensor("i", "INT64", np.array([2**53])),
            Tensor("b", "BOOL", np.array([[True], [False]])),
            bytes_tensor("s", [b"one", b"two"]),
        )
        for tensor in tensors:
            add_input(request, tensor)
        answers = await asyncio.gather(*(stub.ModelInfer(request) for _ in range(8)))
        for answer in answers:
            decoded = decode_outputs(answer)
            for tensor in tensors:
                np.testing.assert_array_equal(decoded[tensor.name].array, tensor.array)

        def wrong(model, name):
            request = pb.ModelInferRequest(model_name=model)
            add_input(request, Tensor(name, "FP32", np.array([1], dtype=np.float32)))
            return stub.ModelInfer(request)

        assert await code_of(wrong("nobody", "x")) is grpc.StatusCode.NOT_FOUND
        # KServe's own status for a failure of its model.
        failed = await refusal(wrong("echo", "fails"))
        assert (failed.code(), failed.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the model failed")
