"""Every streaming way in at the gateway: one prompt to a text model, and the text of each piece as it comes.

By gRPC as a gRPC client makes the calls, by HTTP through `curl -N`, which shows what an ordinary client
sees, pipes and all. A piece is what one message or one event says; closing the generator ends the call.
Used by the tests; the other benchmarks take its prompt.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from millrace.oip.parameters import set_parameters
from millrace.oip.tensors import add_input, bytes_tensor, decode_outputs
from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2, millrace_pb2_grpc
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub

PROMPT = "Tell me a story about a fox."
HAS_CURL = shutil.which("curl") is not None

_FRAME_HEAD = 5  # Of gRPC-Web: a byte of flags and four of the length.
_TRAILERS = 0x80

# Gateway's address, model, how many tokens, request id → pieces of text.
WayIn = Callable[[str, str, int, str], AsyncGenerator[str, None]]
Pieces = AsyncGenerator[str, None]


async def generate(gateway: str, model: str, tokens: int, request_id: str) -> Pieces:
    request = _generate_request(model, tokens, request_id)
    async with grpc.aio.insecure_channel(gateway) as channel:
        async for response in millrace_pb2_grpc.TextGenerationStub(channel).Generate(request):
            yield response.text


async def model_stream_infer(gateway: str, model: str, tokens: int, request_id: str) -> Pieces:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    add_input(request, bytes_tensor("text_input", [PROMPT.encode()]))
    set_parameters(request.parameters, _sampling(tokens))

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield request

    async with grpc.aio.insecure_channel(gateway) as channel:
        async for response in GRPCInferenceServiceStub(channel).ModelStreamInfer(requests()):
            yield decode_outputs(response.infer_response)["text_output"].array[0].decode()


def by_events(path: str, body: Mapping[str, Any], text_of: Callable[[Any], str]) -> WayIn:
    """Server-sent events; `text_of` takes an event's JSON."""

    async def stream(gateway: str, model: str, tokens: int, request_id: str) -> Pieces:
        named = {} if "{model}" in path else {"model": model}
        whole = json.dumps({**named, "stream": True, **_sampling(tokens), **body}).encode()
        async with aclosing(curl(gateway, path.format(model=model), whole, "application/json", request_id)) as output:
            async for line in _lines(output):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield text_of(json.loads(line.removeprefix(b"data: ")))

    return stream


async def millrace_generate(gateway: str, model: str, tokens: int, request_id: str) -> Pieces:
    body = json.dumps({"model": model, "prompt": PROMPT, **_sampling(tokens)}).encode()
    async with aclosing(curl(gateway, "/millrace/v1/generate", body, "application/json", request_id)) as output:
        async for line in _lines(output):
            yield json.loads(line)["text"]


async def grpc_web(gateway: str, model: str, tokens: int, request_id: str) -> Pieces:
    message = _generate_request(model, tokens, request_id).SerializeToString()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    path, kind = "/millrace.v1.TextGeneration/Generate", "application/grpc-web+proto"
    waiting = b""
    async with aclosing(curl(gateway, path, body, kind, request_id)) as output:
        async for piece in output:
            waiting += piece
            while len(waiting) >= _FRAME_HEAD:
                end = _FRAME_HEAD + int.from_bytes(waiting[1:_FRAME_HEAD], "big")
                if len(waiting) < end:
                    break
                frame, waiting = waiting[:end], waiting[end:]
                if not frame[0] & _TRAILERS:
                    yield millrace_pb2.GenerateResponse.FromString(frame[_FRAME_HEAD:]).text


async def curl(gateway: str, path: str, body: bytes, content_type: str, request_id: str) -> AsyncGenerator[bytes, None]:
    """What `curl -N` writes, as it writes it; RuntimeError where the answer is an error."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "--no-buffer", "--silent", "--show-error", "--fail-with-body", "--data-binary", "@-"),
        *("--header", f"content-type: {content_type}", "--header", f"x-request-id: {request_id}"),
        f"http://{gateway}{path}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("curl has no pipes")
    try:
        process.stdin.write(body)
        process.stdin.close()
        last = b""
        while piece := await process.stdout.read(65536):
            last = piece
            yield piece
        if code := await process.wait():
            raise RuntimeError(f"curl ended with {code}: {last[:300]!r}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    waiting = b""
    async for piece in pieces:
        *whole, waiting = (waiting + piece).split(b"\n")
        for line in whole:
            if line:
                yield line


def _generate_request(model: str, tokens: int, request_id: str) -> millrace_pb2.GenerateRequest:
    return millrace_pb2.GenerateRequest(model=model, prompt=PROMPT, request_id=request_id, **_sampling(tokens))


def _sampling(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


WAYS_IN: Mapping[str, WayIn] = {
    "Generate": generate,
    "ModelStreamInfer": model_stream_infer,
    "completions": by_events("/v1/completions", {"prompt": PROMPT}, lambda event: event["choices"][0]["text"]),
    "chat completions": by_events(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}]},
        lambda event: event["choices"][0]["delta"]["content"],
    ),
    "generate_stream": by_events(
        "/v2/models/{model}/generate_stream", {"text_input": PROMPT}, lambda event: event["text_output"]
    ),
    "millrace generate": millrace_generate,
    "gRPC-Web": grpc_web,
}
