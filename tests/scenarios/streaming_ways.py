"""Every streaming way in at the gateway: one prompt to a text model, and the text of each piece as it comes.

A piece is the text of one message or one event; closing the generator ends the call.
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import httpx2

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, each, text_request, web_frames

MODEL, PROMPT, TOKENS = "storyteller", "Tell me a story about a fox.", 8
_SAMPLING: Mapping[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

# Gateway's address and request id → pieces of text.
StreamingWay = Callable[[str, str], AsyncGenerator[str, None]]
Pieces = AsyncGenerator[str, None]


async def generate(gateway: str, request_id: str) -> Pieces:
    async with channel(gateway) as opened:
        async for response in headrace_pb2_grpc.TextGenerationStub(opened).Generate(_generate_request(request_id)):
            yield response.text


async def model_stream_infer(gateway: str, request_id: str) -> Pieces:
    request = text_request(MODEL, PROMPT)
    request.id = request_id
    set_parameters(request.parameters, _SAMPLING)
    async with channel(gateway) as opened:
        async for response in GRPCInferenceServiceStub(opened).ModelStreamInfer(each(request)):
            yield decode_outputs(response.infer_response)["text_output"].array[0].decode()


def by_lines(path: str, body: Mapping[str, Any], text_of: Callable[[Any], str]) -> StreamingWay:
    """Lines of JSON or server-sent events; `text_of` gets the JSON of one."""

    async def stream(gateway: str, request_id: str) -> Pieces:
        data = json.dumps({**_SAMPLING, **body}).encode()
        async with aclosing(_posted(gateway, path, data, request_id, "application/json")) as pieces:
            waiting = b""
            async for piece in pieces:
                *lines, waiting = (waiting + piece).split(b"\n")
                for line in lines:
                    if line and line != b"data: [DONE]":
                        yield text_of(json.loads(line.removeprefix(b"data: ")))

    return stream


async def grpc_web(gateway: str, request_id: str) -> Pieces:
    message = _generate_request(request_id).SerializeToString()
    frame, path = b"\0" + len(message).to_bytes(4, "big") + message, "/headrace.v1.TextGeneration/Generate"
    body, count = b"", 0
    async with aclosing(_posted(gateway, path, frame, request_id, "application/grpc-web+proto")) as pieces:
        async for piece in pieces:
            body += piece
            messages, _ = web_frames(body)
            for whole in messages[count:]:
                yield headrace_pb2.GenerateResponse.FromString(whole).text
            count = len(messages)


async def _posted(gateway: str, path: str, data: bytes, request_id: str, kind: str) -> AsyncGenerator[bytes, None]:
    headers = {"content-type": kind, "x-request-id": request_id}
    async with (
        httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=None) as client,
        client.stream("POST", path, content=data, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for piece in response.aiter_raw():
            yield piece


def _generate_request(request_id: str) -> headrace_pb2.GenerateRequest:
    return headrace_pb2.GenerateRequest(model=MODEL, prompt=PROMPT, request_id=request_id, **_SAMPLING)


_PROMPT, _CHAT = {"model": MODEL, "prompt": PROMPT}, [{"role": "user", "content": PROMPT}]
STREAMING_WAYS: Mapping[str, StreamingWay] = {
    "Generate": generate,
    "ModelStreamInfer": model_stream_infer,
    "completions": by_lines("/v1/completions", {**_PROMPT, "stream": True}, lambda event: event["choices"][0]["text"]),
    "chat completions": by_lines(
        "/v1/chat/completions",
        {"model": MODEL, "messages": _CHAT, "stream": True},
        lambda event: event["choices"][0]["delta"]["content"],
    ),
    "generate_stream": by_lines(
        f"/v2/models/{MODEL}/generate_stream", {"text_input": PROMPT}, lambda event: event["text_output"]
    ),
    "headrace generate": by_lines("/headrace/v1/generate", _PROMPT, lambda line: line["text"]),
    "gRPC-Web": grpc_web,
}
