"""KServe's own gRPC and REST clients against the models of tests/conformance: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import asyncio
import logging
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

GATEWAY = sys.argv[1]
URL = f"http://{GATEWAY}"
PROMPT = "Once upon a time"
GREEDY = {"temperature": "0", "max_tokens": 12, "ignore_eos": True}
# The client also logs the errors that it raises.
logging.disable(logging.CRITICAL)


def text_request(model, name="text_input", text=PROMPT, parameters=None, binary=True):
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object), binary_data=binary)
    return InferRequest(model, [tensor], request_id="r", parameters=parameters or {})


def tensor_request(binary=True):
    request = InferRequest("identity", [])
    for datatype, dtype in (("FP32", np.float32), ("INT64", np.int64), ("BOOL", np.bool_), ("UINT8", np.uint8)):
        tensor = InferInput(datatype, [2, 3], datatype)
        tensor.set_data_from_numpy(np.arange(6).reshape(2, 3).astype(dtype), binary_data=binary)
        request.inputs.append(tensor)
    return request


def check_tensors(response):
    assert {output.name for output in response.outputs} == {"FP32", "INT64", "BOOL", "UINT8"}
    for output in response.outputs:
        array = output.as_numpy()
        assert np.array_equal(array, np.arange(6).reshape(2, 3).astype(array.dtype)), output


def text_of(response):
    (item,) = response.get_output_by_name("text_output").as_numpy()
    return item if isinstance(item, str) else item.decode()


async def refused_grpc(code, text, call):
    refusal = None
    try:
        await call
    except grpc.RpcError as error:
        refusal = error
    assert refusal is not None, f"was not refused: {text}"
    assert refusal.code() is code, refusal
    assert text in refusal.details(), refusal


async def refused_rest(status, text, call):
    refusal = None
    try:
        await call
    except httpx.HTTPStatusError as error:
        refusal = error
    assert refusal is not None, f"was not refused: {text}"
    assert refusal.response.status_code == status, refusal
    assert text in str(refusal), refusal


async def by_grpc():
    async with InferenceGRPCClient(GATEWAY) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("storyteller")
        assert not await client.is_model_ready("nobody")
        whole = await client.infer(text_request("storyteller", parameters=GREEDY))
        assert whole.id == "r"
        story = text_of(whole)
        check_tensors(await client.infer(tensor_request()))
        check_tensors(await client.infer(tensor_request(binary=False)))
        await refused_grpc(grpc.StatusCode.NOT_FOUND, "no model 'nobody'", client.infer(text_request("nobody")))
        bad = text_request("storyteller", parameters={"max_tokens": -1})
        await refused_grpc(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens", client.infer(bad))
        answers = await asyncio.gather(
            *(client.infer(text_request("storyteller", parameters=GREEDY)) for _ in range(8))
        )
        assert {text_of(answer) for answer in answers} == {story}
        return story


async def by_rest(story):
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:

        def infer(request, **options):
            return client.infer(URL, request, model_name=request.model_name, **options)

        assert await client.is_server_live(URL)
        assert await client.is_server_ready(URL)
        assert await client.is_model_ready(URL, "storyteller")
        assert not await client.is_model_ready(URL, "nobody")
        for binary in (True, False):
            check_tensors(await infer(tensor_request(binary)))
            answer = await infer(text_request("storyteller", parameters=GREEDY, binary=binary))
            assert (answer.id, text_of(answer)) == ("r", story)
        await refused_rest(404, "no model 'nobody'", infer(text_request("nobody")))
        bad = text_request("storyteller", parameters={"max_tokens": -1})
        await refused_rest(400, "max_tokens", infer(bad))
        waits = text_request("chunks", "INPUT", "a", {"waits": True})
        await refused_rest(504, "deadline", infer(waits, headers={"x-timeout-ms": "300"}))
        assert text_of(await infer(text_request("storyteller", parameters=GREEDY))) == story


STORY = asyncio.run(by_grpc())
asyncio.run(by_rest(STORY))
print("done")
