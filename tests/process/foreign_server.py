"""A server of the Open Inference Protocol without Headrace's additions: no health service, no ModelConfig, no index.

Models: `echo`, which returns its tensors, and `ids`, which takes input_ids INT64 [1, N] and streams
the same ids as output_ids, one per answer, without a mark of the end.
"""

from contextlib import asynccontextmanager
from functools import partial

import grpc
import numpy as np

from headrace.oip.tensors import Tensor, add_output, decode_inputs
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc

MODELS = ("echo", "ids")
Metadata = pb.ModelMetadataResponse.TensorMetadata


class ForeignServer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, ready=MODELS):
        self.ready = set(ready)
        self.requests = []

    async def ServerReady(self, request, context):  # noqa: N802
        return pb.ServerReadyResponse(ready=True)

    async def ModelReady(self, request, context):  # noqa: N802
        return pb.ModelReadyResponse(ready=request.name in self.ready)

    async def ModelMetadata(self, request, context):  # noqa: N802
        await self._known(request.name, context)
        response = pb.ModelMetadataResponse(name=request.name, versions=["7"], platform="foreign")
        if request.name == "ids":
            response.inputs.append(Metadata(name="input_ids", datatype="INT64", shape=[1, -1]))
            response.outputs.append(Metadata(name="output_ids", datatype="INT64", shape=[1, -1]))
        return response

    async def ModelInfer(self, request, context):  # noqa: N802
        await self._known(request.model_name, context)
        self.requests.append(request)
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(raw)
        return response

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            if request.model_name not in self.ready:
                yield pb.ModelStreamInferResponse(error_message=f"{request.model_name} is not here")
            elif request.model_name == "ids":
                self.requests.append(request)
                ids = decode_inputs(request)["input_ids"].array
                for position in range(min(ids.shape[1], request.parameters["max_tokens"].int64_param)):
                    response = pb.ModelInferResponse(model_name="ids", id=request.id)
                    add_output(
                        response, Tensor("output_ids", "INT64", np.ascontiguousarray(ids[:, position : position + 1]))
                    )
                    yield pb.ModelStreamInferResponse(infer_response=response)
            else:
                yield pb.ModelStreamInferResponse(infer_response=await self.ModelInfer(request, context))

    async def _known(self, name, context):
        if name not in self.ready:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{name} is not here")


@asynccontextmanager
async def foreign_server(servicer):
    """Its address while it runs."""
    async with one_service(partial(inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, servicer)) as address:
        yield address


@asynccontextmanager
async def one_service(add_to_server, interceptors=()):
    """The address of a server with one service, while it runs."""
    server = grpc.aio.server(interceptors=interceptors)
    add_to_server(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
