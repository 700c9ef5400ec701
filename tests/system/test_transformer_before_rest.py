"""A transformer with TRANSFORMER_PROTOCOL=v2, in its own process, before the gateway of another Headrace stack."""

import asyncio
import os
import socket
import sys
from contextlib import asynccontextmanager, closing

import grpc
import numpy as np
import pytest

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import each, text_request
from tests.waiting import until


@asynccontextmanager
async def transformer_process(predictor, folder):
    """A stub of a running transformer; it has no logger."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    own = {
        "MODELS": "identity=models/identity",
        "TRANSFORMER_HTTP_PORT": "0",
        "TRANSFORMER_LOGGER": "127.0.0.1:9",
        "TRANSFORMER_METRICS_PORT": "0",
        "TRANSFORMER_PAYLOAD_SPOOL": str(folder / "spool"),
        "TRANSFORMER_PORT": str(port),
        "TRANSFORMER_PREDICTOR": predictor,
        "TRANSFORMER_PROTOCOL": "v2",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.transformer", env=os.environ | own)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 250)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub = GRPCInferenceServiceStub(channel)
            await stub.ServerLive(pb.ServerLiveRequest(), wait_for_ready=True, timeout=60)

            async def ready():
                return (await stub.ServerReady(pb.ServerReadyRequest())).ready

            await until(ready, timeout_s=60)
            yield stub
    finally:
        process.terminate()
        await process.wait()


async def test_tensors_and_whole_texts_pass_both(new_stack, tmp_path):
    stack = await new_stack(models="storyteller=models/storyteller,identity=models/identity")
    async with transformer_process(stack.gateway, tmp_path) as stub:
        request = pb.ModelInferRequest(model_name="identity", id="r")
        add_input(request, Tensor("x", "FP32", np.arange(1_000_000, dtype=np.float32)))
        answer = await stub.ModelInfer(request)
        assert answer.raw_output_contents[0] == request.raw_input_contents[0]
        (response,) = [response async for response in stub.ModelStreamInfer(each(request))]
        assert response.infer_response.parameters["triton_final_response"].bool_param

        # A text model of the other stack is a model of tensors here.
        text = await stub.ModelInfer(text_request("storyteller", "Once upon a time", max_tokens=5))
        assert decode_outputs(text)["text_output"].array[0]
        with pytest.raises(grpc.aio.AioRpcError, match="no model 'nobody'") as raised:
            await stub.ModelInfer(text_request("nobody", "Once"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "predictor"
