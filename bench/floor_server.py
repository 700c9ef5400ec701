"""The floor of a stack of two Python hops: gRPC servers that only move a request and its answer.

`python -m bench.floor_server PORT` is the predictor: it parses a request of the Open Inference Protocol and answers
with its tensors; a stream has `MESSAGES` answers to each request, the n-th with the number n. With `--forward
HOST:PORT` it is the transformer: it passes the bytes of requests and answers on unparsed. No interceptors, metrics,
traces, log lines, limits, deadlines or error mapping; uvloop, as in the services.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.server_process import LOOPBACK
from bench.tensor_cases import INFER, MESSAGES, STREAM_INFER
from headrace_protos import inference_pb2 as pb

_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))
_SERVICE = "inference.GRPCInferenceService"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("port", type=int)
    options.add_argument("--forward", default="", metavar="HOST:PORT")
    arguments = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(_serve(arguments.port, arguments.forward))


async def _serve(port: int, target: str) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_forwarding(target) if target else _answering(),))
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    await server.start()
    await server.wait_for_termination()


def _answering() -> grpc.GenericRpcHandler:
    async def infer(request: pb.ModelInferRequest, _: Any) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor in request.inputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.extend(request.raw_input_contents)
        return response

    async def stream(requests: AsyncIterator[pb.ModelInferRequest], context: Any) -> None:
        async for request in requests:
            for number in range(MESSAGES):
                message = pb.ModelStreamInferResponse()
                response = message.infer_response
                response.model_name, response.id = request.model_name, request.id
                response.outputs.add(name="n", datatype="INT64", shape=[1])
                response.raw_output_contents.append(number.to_bytes(8, "little"))
                await context.write(message)

    parse = pb.ModelInferRequest.FromString
    return grpc.method_handlers_generic_handler(
        _SERVICE,
        {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(infer, parse, pb.ModelInferResponse.SerializeToString),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                stream, parse, pb.ModelStreamInferResponse.SerializeToString
            ),
        },
    )


def _forwarding(target: str) -> grpc.GenericRpcHandler:
    channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    call_one: Any = channel.unary_unary(INFER)
    call_many: Any = channel.stream_stream(STREAM_INFER)

    async def infer(request: bytes, _: Any) -> bytes:
        answer: bytes = await call_one(request)
        return answer

    async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
        call = call_many()
        async for request in requests:
            await call.write(request)
        await call.done_writing()
        while (answer := await call.read()) is not grpc.aio.EOF:
            await context.write(answer)

    return grpc.method_handlers_generic_handler(
        _SERVICE,
        {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(stream),
        },
    )


if __name__ == "__main__":
    main()
