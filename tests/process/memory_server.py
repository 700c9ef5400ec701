"""A server of the protocol in a process of its own, whose memory is looked at from outside.

Prints its port. ModelInfer answers with its request's id as soon as it is let go: by a line on standard input.
"""

import asyncio
import sys

from millrace.oip.stream_infer import multiplex
from millrace.rpc.admission import Admission
from millrace.rpc.byte_budget import ByteBudget
from millrace.rpc.server import Server
from millrace_protos import inference_pb2 as pb
from millrace_protos import inference_pb2_grpc


class Inference(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self):
        self.go = asyncio.Event()

    async def ModelInfer(self, request, context):  # noqa: N802
        await self.go.wait()
        return pb.ModelInferResponse(id=request.id)

    async def ModelStreamInfer(self, requests, context):  # noqa: N802
        async def answer(request):
            yield await self.ModelInfer(request, context)

        async for response in multiplex(requests, answer, True):
            yield response

    async def ServerLive(self, request, context):  # noqa: N802
        return pb.ServerLiveResponse(live=True)


async def main():
    server, servicer = (
        Server("test", "127.0.0.1", 0, 0.0, admission=Admission(64, ByteBudget(int(sys.argv[1])))),
        Inference(),
    )
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server.grpc)
    port = server.grpc.add_insecure_port("127.0.0.1:0")
    await server.grpc.start()
    print(port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        servicer.go.set()


asyncio.run(main())
