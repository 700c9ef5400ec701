"""KServe's own gRPC client against the transformer of deploy/kserve: ADDRESS MODEL.

Run in the clients' environment; prints "done" if every check passed.
"""

import asyncio
import logging
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

ADDRESS, MODEL = sys.argv[1:]
GREEDY = {"temperature": "0", "max_tokens": 12, "ignore_eos": True}
# The client also logs the errors that it raises.
logging.disable(logging.CRITICAL)


def request(model=MODEL, **parameters):
    tensor = InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"Once upon a time"], dtype=object), binary_data=True)
    return InferRequest(model, [tensor], request_id="r", parameters=parameters or GREEDY)


async def code_of(call):
    try:
        await call
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def main():
    async with InferenceGRPCClient(ADDRESS) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(MODEL)
        answer = await client.infer(request())
        (text,) = answer.get_output_by_name("text_output").as_numpy()
        assert answer.id == "r"
        assert text
        assert await code_of(client.infer(request("nobody"))) is grpc.StatusCode.NOT_FOUND
        assert await code_of(client.infer(request(max_tokens=-1))) is grpc.StatusCode.INVALID_ARGUMENT


asyncio.run(main())
print("done")
