"""The transformer before NVIDIA's own tritonserver: relayed tensors, text over ids, loading and unloading."""

import asyncio
import os
import shutil
import socket
import sysconfig
from contextlib import closing, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from tests.support.status import refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request
from tests.waiting import until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-triton"
PACKAGES = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
SERVER = PACKAGES / "pytriton" / "tritonserver"


@pytest_asyncio.fixture(scope="module")
async def triton(tmp_path_factory):
    """The address of a tritonserver with the models of tests/triton/models."""
    if not (SERVER / "bin" / "tritonserver").exists():
        pytest.skip("Triton's own environment is not installed (make .venv-triton/.installed)")
    folder = tmp_path_factory.mktemp("triton")
    backends = shutil.copytree(SERVER / "backends", folder / "backends")
    models = shutil.copytree(ROOT / "tests" / "triton" / "models", folder / "models")  # Their path may have no space.
    shutil.copy(SERVER / "python_backend_stubs" / "3.11" / "triton_python_backend_stub", backends / "python")
    with closing(socket.create_server(("127.0.0.1", 0))) as one, closing(socket.create_server(("127.0.0.1", 0))) as two:
        port, http_port = one.getsockname()[1], two.getsockname()[1]
    libraries = (PACKAGES / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR"))
    own = {
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PYTHONPATH": str(PACKAGES),
        # Its models' interpreter takes numpy from the first Python in PATH; with another one, tensors come back empty.
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
    }
    command = (
        str(SERVER / "bin" / "tritonserver"),
        f"--model-repository={models}",
        f"--backend-directory={backends}",
        *("--model-control-mode=explicit", "--load-model=*", "--grpc-address=127.0.0.1", f"--grpc-port={port}"),
        *("--http-address=127.0.0.1", f"--http-port={http_port}", "--allow-metrics=false", "--exit-timeout-secs=2"),
    )
    log = folder / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | own, stdout=output, stderr=output)
    try:
        await until(lambda: process.returncode is not None or b"Started HTTPService" in log.read_bytes())
        if process.returncode is not None:
            pytest.skip(f"tritonserver does not run here: {log.read_text(errors='replace').strip().splitlines()[-1]}")
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def echo_request(**fields):
    request = pb.ModelInferRequest(model_name="echo", id="r", **fields)
    add_input(request, Tensor("x", "FP32", np.arange(5, dtype=np.float32)))
    return request


async def test_tensors_and_tritons_messages_are_relayed(triton):
    async with transformer(triton) as (stub, _):
        answers = await asyncio.gather(*(stub.ModelInfer(echo_request()) for _ in range(16)))
        assert all(decode_outputs(answer)["x"].array.tolist() == [0, 1, 2, 3, 4] for answer in answers)
        assert (await stub.ModelConfig(pb.ModelConfigRequest(name="echo"))).config.backend == "python"

        async def every_inference_is_counted() -> bool:
            """Triton counts an inference after its answer has left."""
            (statistics,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="echo"))).model_stats
            return statistics.inference_count >= 16

        await until(every_inference_is_counted)
        raised = await refusal(stub.ModelInfer(pb.ModelInferRequest(model_name="echo")))
        assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "expected 1 inputs" in raised.details()
        assert dict(raised.trailing_metadata())["x-failed-hop"] == "predictor"


@pytest.mark.parametrize("empty_final", [False, True])
async def test_a_stream_keeps_tritons_own_marks(triton, empty_final):
    async with transformer(triton) as (stub, _):
        request = echo_request()
        if empty_final:
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        responses = [response.infer_response async for response in stub.ModelStreamInfer(each(request))]
        assert [r.parameters["triton_final_response"].bool_param for r in responses][-1:] == [True]
        assert sum(len(r.outputs) for r in responses) == 1


async def test_text_is_generated_over_its_ids(triton):
    async with transformer(triton, "ids=models/storyteller") as (stub, _):
        request = text_request("ids", "Once upon a time", max_tokens=60)
        responses = [response async for response in stub.ModelStreamInfer(each(request))]
        assert not any(response.error_message for response in responses)
        text = b"".join(decode_outputs(r.infer_response)["text_output"].array[0] for r in responses)
        assert text.decode().strip() == "Once upon a time"
        assert len(responses) > 3


async def test_models_are_loaded_and_unloaded_there(triton):
    async with transformer(triton) as (stub, _):
        await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="echo"))
        await until(lambda: not stub.router.is_ready("echo"))
        raised = await refusal(stub.ModelInfer(echo_request()))
        assert raised.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"))
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        assert await stub.ModelInfer(echo_request())
