"""A service with a method of every kind, under names of the stack's own protocols, and calls of them."""

import asyncio

import grpc

from headrace_protos import headrace_pb2, inference_pb2

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_TEXT = headrace_pb2.DESCRIPTOR.services_by_name["TextGeneration"].full_name
_LOG = headrace_pb2.DESCRIPTOR.services_by_name["PayloadLog"].full_name
# The declared methods.
METHODS = {
    "unary": f"{_INFERENCE}/ModelInfer",
    "stream": f"{_TEXT}/Generate",
    "bidi": f"{_INFERENCE}/ModelStreamInfer",
    "written": f"{_LOG}/Query",
}
KINDS = tuple(METHODS)


class Methods(grpc.GenericRpcHandler):
    """A method of every kind; each answers once, then `then` runs."""

    def __init__(self, then=None):
        self.then = then
        self.answered = asyncio.Event()

    def service(self, handler_call_details):
        async def unary(request, context):
            self.answered.set()
            await self.then(context)
            return request

        async def stream(request, context):
            yield request
            self.answered.set()
            await self.then(context)

        async def bidi(requests, context):
            async for request in requests:
                yield request
                self.answered.set()
                await self.then(context)

        async def written(request, context):
            await context.write(request)
            self.answered.set()
            await self.then(context)

        return {
            f"/{METHODS['unary']}": grpc.unary_unary_rpc_method_handler(unary),
            f"/{METHODS['stream']}": grpc.unary_stream_rpc_method_handler(stream),
            f"/{METHODS['bidi']}": grpc.stream_stream_rpc_method_handler(bidi),
            f"/{METHODS['written']}": grpc.unary_stream_rpc_method_handler(written),
        }.get(handler_call_details.method)


def open_call(channel, kind, payload=b"x", **options):
    """The call object of a new call."""
    method = f"/{METHODS[kind]}"
    if kind == "unary":
        return channel.unary_unary(method)(payload, **options)
    if kind == "bidi":
        return channel.stream_stream(method)(iter([payload]), **options)
    return channel.unary_stream(method)(payload, **options)


async def answers_of(channel, kind, payload=b"x", **options):
    """The answers of a call that is read to its end."""
    call = open_call(channel, kind, payload, **options)
    return [await call] if kind == "unary" else [response async for response in call]
