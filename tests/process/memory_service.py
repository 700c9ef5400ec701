"""A server of the protocol in its own process, whose memory is measured from outside.

`python -m tests.process.memory_service BUDGET` prints its port. ModelInfer answers with its request's id once it
is released, by SIGUSR1.
"""

import asyncio
import signal
import sys

from headrace.oip.stream_infer import multiplex
from headrace.rpc.limits.admission import Admission
from headrace.rpc.limits.byte_budget import ByteBudget
from headrace.rpc.server.server import Server
from headrace.settings import ServiceSettings
from headrace_protos import inference_pb2 as pb
from headrace_protos import inference_pb2_grpc


class Inference(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request when it is released; `messages` counts those of unary calls."""

    def __init__(self):
        self.go = asyncio.Event()
        self.messages = 0

    async def ModelInfer(self, request, context):  # noqa: N802
        self.messages += 1
        await self.go.wait()
        return pb.ModelInferResponse(id=request.id)

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        async def answer(request):
            await self.go.wait()
            yield pb.ModelInferResponse(id=request.id)

        async for response in multiplex(request_iterator, answer, False):
            yield response

    async def ServerLive(self, request, context):  # noqa: N802
        return pb.ServerLiveResponse(live=True)


async def main():
    settings = ServiceSettings.model_construct(drain_s=0.0)
    admission = Admission(64, ByteBudget(int(sys.argv[1])))
    server, servicer = Server("test", settings, admission=admission), Inference()
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server.grpc)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, servicer.go.set)
    port = server.grpc.add_insecure_port("127.0.0.1:0")
    await server.grpc.start()
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
