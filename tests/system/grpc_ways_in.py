"""Ways in over gRPC and gRPC-Web."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from urllib.parse import unquote

import grpc
import numpy as np
from google.protobuf.message import Message

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import Tensor, add_input, bytes_tensor
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import http_request, web_frames
from tests.system.request_outcome import ON_STREAM, STREAM_LOST, Outcome, Request, WayIn, in_thread, tensor_model

_GENERATE = "/headrace.v1.TextGeneration/Generate"
_NO_LIMIT = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def _channel(gateway: str, authority: str | None) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), *_NO_LIMIT]
    return grpc.aio.insecure_channel(
        gateway, options=options + ([("grpc.default_authority", authority)] if authority else [])
    )


def _grpc_outcome(error: grpc.aio.AioRpcError, begun: bool = False) -> Outcome:
    metadata = {**dict(error.initial_metadata() or ()), **dict(error.trailing_metadata() or ())}
    return Outcome(
        error.code(), metadata.get("x-failed-hop"), error.details() or "", metadata.get("retry-after-ms"), begun
    )


def _generate_request(request: Request) -> headrace_pb2.GenerateRequest:
    return headrace_pb2.GenerateRequest(model=request.model, prompt=request.prompt, **request.parameters)


async def generate(gateway: str, request: Request) -> Outcome:
    begun = False
    async with _channel(gateway, None) as channel:
        try:
            call = headrace_pb2_grpc.TextGenerationStub(channel).Generate(
                _generate_request(request), timeout=request.timeout_s, metadata=request.metadata
            )
            async for _ in call:
                begun = True
            headers = dict(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            return _grpc_outcome(error, begun)
    return Outcome(grpc.StatusCode.OK, begun=begun, headers=headers)


def text_request(request: Request) -> pb.ModelInferRequest:
    return _infer_request(request, request.model, bytes_tensor("text_input", [request.prompt.encode()]))


def ids_request(request: Request) -> pb.ModelInferRequest:
    # About as many ids as the text would make, all of them in any vocabulary.
    ids = np.full(max(1, len(request.prompt) // 5), 7, dtype=np.int64)
    return _infer_request(request, request.model, Tensor("input_ids", "INT64", ids))


def tensor_request(request: Request) -> pb.ModelInferRequest:
    return _infer_request(request, tensor_model(request), bytes_tensor("x", [request.prompt.encode()]))


def _infer_request(request: Request, model: str, tensor: Tensor) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, model_version=request.version, id=request.id)
    add_input(message, tensor)
    set_parameters(message.parameters, request.parameters)
    return message


def model_infer(build: Callable[[Request], pb.ModelInferRequest], authority: str | None = None) -> WayIn:
    async def way_in(gateway: str, request: Request) -> Outcome:
        async with _channel(gateway, authority) as channel:
            try:
                await GRPCInferenceServiceStub(channel).ModelInfer(build(request), timeout=request.timeout_s)
            except grpc.aio.AioRpcError as error:
                return _grpc_outcome(error)
        return Outcome(grpc.StatusCode.OK)

    return way_in


def model_stream_infer(
    build: Callable[[Request], pb.ModelInferRequest], authority: str | None = None, as_status: bool = False
) -> WayIn:
    """Where an error is a response of the stream, another request on the same stream must be answered."""

    async def way_in(gateway: str, request: Request) -> Outcome:
        requests: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue()
        requests.put_nowait(build(request))
        errors: list[str] = []
        begun = False
        metadata = (*request.metadata, *((("triton_grpc_error", "true"),) if as_status else ()))
        async with _channel(gateway, authority) as channel:
            call = GRPCInferenceServiceStub(channel).ModelStreamInfer(
                _each(requests), timeout=request.timeout_s, metadata=metadata
            )
            try:
                async for response in call:
                    if response.error_message:
                        errors.append(response.error_message)
                        assert response.infer_response.id == request.id
                        requests.put_nowait(build(Request()) if request.goes_on and len(errors) == 1 else None)
                    elif response.infer_response.parameters["triton_final_response"].bool_param:
                        requests.put_nowait(None)
                    elif not errors:
                        begun = True
                headers = dict(await call.initial_metadata())
            except grpc.aio.AioRpcError as error:
                return _grpc_outcome(error, begun)
            finally:
                requests.put_nowait(None)
        if not errors:
            return Outcome(grpc.StatusCode.OK, begun=begun, headers=headers)
        return Outcome(ON_STREAM if len(errors) == 1 else STREAM_LOST, None, errors[-1], None, begun)

    return way_in


async def _each(requests: asyncio.Queue[pb.ModelInferRequest | None]) -> AsyncIterator[pb.ModelInferRequest]:
    while (message := await requests.get()) is not None:
        yield message


# ------------------------------------------------------------------ gRPC-Web


async def grpc_web(gateway: str, request: Request) -> Outcome:
    message = _generate_request(request)
    return await in_thread(grpc_web_call, gateway, _GENERATE, message, request.timeout_s)


def grpc_web_call(gateway: str, path: str, message: Message, timeout_s: float) -> Outcome:
    """One call as a browser makes it: trailers are a frame of the body, or headers where there is no body."""
    data = message.SerializeToString()
    headers = {
        "content-type": "application/grpc-web+proto",
        "x-grpc-web": "1",
        "grpc-timeout": f"{int(timeout_s * 1000)}m",
    }
    answer = http_request(gateway, "POST", path, b"\0" + struct.pack(">I", len(data)) + data, headers)
    messages, trailers = web_frames(answer.body)
    metadata = {**answer.headers, **trailers}
    assert answer.status == 200, (answer.status, answer.body)
    status = next(code for code in grpc.StatusCode if code.value[0] == int(metadata["grpc-status"]))
    message_text = unquote(metadata.get("grpc-message", ""))
    return Outcome(
        status, metadata.get("x-failed-hop"), message_text, metadata.get("retry-after-ms"), begun=bool(messages)
    )
