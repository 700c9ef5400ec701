"""On every streaming way in, chunk i reaches the client before the model makes chunk i + 1."""

import asyncio
import http.client
import json
import socket
import sys

import pytest

from millrace.protos import millrace_pb2, millrace_pb2_grpc
from millrace.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from millrace.tensors import decode_outputs
from tests.system.calls import channel, each, text_request

PROMPT = "Once upon a time"
TOKENS = 12


async def by_generate(gateway):
    request = millrace_pb2.GenerateRequest(model="storyteller", prompt=PROMPT, temperature=0, max_tokens=TOKENS)
    async with channel(gateway) as open_channel:
        async for response in millrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request):
            yield response.text


async def by_model_stream_infer(gateway):
    request = text_request("storyteller", PROMPT, temperature=0, max_tokens=TOKENS)
    async with channel(gateway) as open_channel:
        async for response in GRPCInferenceServiceStub(open_channel).ModelStreamInfer(each(request)):
            yield decode_outputs(response.infer_response)["text_output"].array[0].decode()


def by_server_sent_events(path, body, text_of_choice):
    async def stream(gateway):
        host, _, port = gateway.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        whole = {"model": "storyteller", "stream": True, "temperature": 0, "max_tokens": TOKENS, **body}
        await asyncio.to_thread(connection.request, "POST", path, json.dumps(whole))
        response = await asyncio.to_thread(connection.getresponse)
        while (line := await asyncio.to_thread(response.readline)) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                yield text_of_choice(json.loads(line.removeprefix(b"data: "))["choices"][0])
        connection.close()

    return stream


WAYS_IN = {
    "Generate": by_generate,
    "ModelStreamInfer": by_model_stream_infer,
    "completions": by_server_sent_events("/v1/completions", {"prompt": PROMPT}, lambda choice: choice["text"]),
    "chat completions": by_server_sent_events(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]},
        lambda choice: choice["delta"]["content"],
    ),
}


@pytest.fixture
async def gated(new_stack, tmp_path):
    """A stack whose model makes a token for each call of the second value."""
    path = str(tmp_path / "gate")
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "tests.system.gated_predictor")},
        environment={"predictor": {"GATE_SOCKET": path}},
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        yield stack, lambda: sender.sendto(b"1", path)


async def test_each_chunk_arrives_before_the_next_one_is_made(gated):
    stack, let_one_token_be_made = gated
    for name, way_in in WAYS_IN.items():
        chunks = aiter(way_in(stack.gateway))
        texts = []
        for _ in range(TOKENS):
            let_one_token_be_made()
            # The model stands still: what it has made must come, or nothing ever will.
            async with asyncio.timeout(15):
                texts.append(await anext(chunks))
        assert [text for text in texts if text], name
        assert len(texts) == TOKENS, name
        async with asyncio.timeout(15):
            assert await anext(chunks, None) is None, name
