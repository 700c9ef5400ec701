"""KServe's transformer class works before Millrace's predictor and gateway; Millrace's works before KServe's server."""

import asyncio
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest

from millrace.oip.tensors import Tensor, add_input, bytes_tensor
from millrace_protos import inference_pb2 as pb
from tests.support.transformer_fixtures import transformer
from tests.system.own_clients import python_of
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "kserve" / "transformer.py"


async def test_kserves_transformer_calls_the_predictor_and_the_gateway(new_stack):
    python = python_of(".venv-kserve")
    stack = await new_stack(models="identity=models/identity")
    command = [python, str(SCRIPT), "identity", stack.addresses["predictor-0"], stack.gateway]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-2:] == ["done", "done"], done.stderr


async def test_the_transformer_calls_kserves_server_over_rest():
    python = python_of(".venv-kserve")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    server = await asyncio.create_subprocess_exec(python, str(ROOT / "tests" / "kserve" / "server.py"), str(port))
    try:
        async with transformer(f"127.0.0.1:{port}", protocol="v2", ready=False) as (stub, catalogue):
            await until(lambda: catalogue.ready, timeout_s=60)
            tensors = (
                Tensor("f", "FP32", np.arange(40_000, dtype=np.float32).reshape(200, 200)),
                Tensor("i", "INT64", np.array([2**53])),
                Tensor("b", "BOOL", np.array([[True], [False]])),
                bytes_tensor("s", [b"one", b"two"]),
            )
            request = pb.ModelInferRequest(model_name="echo", id="r")
            for tensor in tensors:
                add_input(request, tensor)
            answer = await stub.ModelInfer(request)
            assert list(answer.raw_output_contents) == list(request.raw_input_contents)
            assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
            assert (await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))).name == "echo"
            request.model_name = "nobody"
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(request)
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        server.terminate()
        await server.wait()
