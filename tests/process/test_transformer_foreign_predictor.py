"""The transformer works before any server of the protocol: it relays, and generates for models of ids."""

import grpc
import numpy as np
import pytest

from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request
from tests.waiting import until

TEXT = "ids=models/storyteller"
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def echo_request(**fields):
    request = pb.ModelInferRequest(**{"model_name": "echo", "id": "r", **fields})
    add_input(request, Tensor("x", "FP32", np.arange(4, dtype=np.float32)))
    return request


async def test_readiness_of_an_unlisted_model_is_the_servers_own():
    async with foreign_server(ForeignServer()) as address, transformer(address) as (stub, _):
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="echo"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="nobody"))).ready


async def test_its_own_errors_keep_their_meaning():
    async with foreign_server(ForeignServer()) as address, transformer(address) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="nobody is not here") as raised:
            await stub.ModelInfer(echo_request(model_name="nobody"))
        assert raised.value.code() is NOT_FOUND
        assert dict(raised.value.trailing_metadata())["x-failed-hop"] == "predictor"
        (response,) = [response async for response in stub.ModelStreamInfer(each(echo_request(model_name="nobody")))]
        assert (response.error_message, response.infer_response.id) == ("nobody is not here", "r")


async def test_text_is_converted_to_ids_in_the_form_of_the_metadata_and_back():
    server = ForeignServer()
    async with foreign_server(server) as address, transformer(address, TEXT) as (stub, catalogue):
        request = text_request("ids", "Once upon a time", max_tokens=60)
        responses = [response async for response in stub.ModelStreamInfer(each(request))]
        tensor = server.requests[0].inputs[0]
        assert (tensor.name, tensor.datatype, tensor.shape[0]) == ("input_ids", "INT64", 1)
        text = b"".join(decode_outputs(r.infer_response)["text_output"].array[0] for r in responses)
        assert text.decode().strip() == "Once upon a time"
        last = responses[-1].infer_response.parameters
        assert (last["finish_reason"].string_param, last["triton_final_response"].bool_param) == ("stop", True)
        # The metadata has no context length, so that of the model's files counts.
        assert catalogue.find("ids").limits.context_length == 1024
        assert not catalogue.find("ids").resumes

        shorter = await stub.ModelInfer(text_request("ids", "Once upon a time", max_tokens=2))
        assert shorter.parameters["finish_reason"].string_param == "length"
        # It would ignore the form of the answer.
        formed = text_request("ids", "Once upon a time")
        formed.parameters["structured_outputs"].string_param = '{"regex": "a"}'
        with pytest.raises(grpc.aio.AioRpcError, match="its predictor supports no structured_outputs") as raised:
            await stub.ModelInfer(formed)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert all("structured_outputs" not in request.parameters for request in server.requests)


async def test_an_unloaded_model_is_not_found_and_a_new_one_is_served():
    server = ForeignServer(ready=())
    async with foreign_server(server) as address, transformer(address, TEXT, ready=False) as (stub, catalogue):
        await until(lambda: catalogue.ready)
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="ids"))).ready
        with pytest.raises(grpc.aio.AioRpcError, match="no model 'ids'") as raised:
            await stub.ModelInfer(text_request("ids", "Once"))
        assert raised.value.code() is NOT_FOUND

        server.ready.add("ids")
        await until(lambda: stub.router.is_ready("ids"))
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="ids", version="7"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="ids", version="8"))).ready
        assert await stub.ModelInfer(text_request("ids", "Once", max_tokens=1))

        server.ready.clear()
        await until(lambda: not stub.router.is_ready("ids"))


async def test_without_any_server_models_are_not_ready_instead_of_unknown():
    async with transformer("127.0.0.1:9", TEXT, ready=False, wait_s=0.2) as (stub, catalogue):
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        for name in ("ids", "nobody"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(text_request(name, "Once"))
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not catalogue.ready


async def test_background_calls_of_the_transformer_are_not_traced():
    class Listening(ForeignServer):
        seen = None

        async def ServerReady(self, request, context):  # noqa: N802
            Listening.seen = dict(context.invocation_metadata()).get("traceparent", "")
            return await super().ServerReady(request, context)

    async with foreign_server(Listening()) as address, transformer(address):
        assert Listening.seen.endswith("-00")
