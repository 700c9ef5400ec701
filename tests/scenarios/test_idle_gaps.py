"""Idle gaps and an hour of silence, with the gateway's idle limits cut from minutes to seconds.

Here seconds end an idle call or connection instead of hours; the rest of the gateway is the real one. The
real limits are tested in tests/process/test_gateway_config.py.
"""

import asyncio

import grpc
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc, inference_pb2
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.system.calls import channel, rest, text_request
from tests.system.gated_stack import gated_stack

CONNECTION_S, STREAM_S = 1, 3  # Instead of 3600 and 600.
PING_S = 1  # Instead of 30.


def shortened(config):
    """Cuts every idle limit, also Envoy's defaults between the gateway and the services."""
    seconds = {
        "3600s": f"{CONNECTION_S}s",
        "600s": f"{STREAM_S}s",
        "3900s": "60s",
        "60s": f"{STREAM_S}s",
        "30s": f"{CONNECTION_S}s",
    }

    def walk(part):
        if isinstance(part, list):
            for item in part:
                walk(item)
        if not isinstance(part, dict):
            return
        for key, value in part.items():
            if key in ("idle_timeout", "stream_idle_timeout"):
                part[key] = seconds[value]
            elif key == "request_headers_timeout":
                part[key] = "1s"
            elif key == "connection_keepalive":
                part[key] = {"interval": f"{PING_S}s", "timeout": "10s"}
            else:
                walk(value)

    walk(config)
    for cluster in config["static_resources"]["clusters"]:
        for options in cluster.get("typed_extension_protocol_options", {}).values():
            options["common_http_protocol_options"] = {"idle_timeout": f"{CONNECTION_S}s"}


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack, and a function that lets its model generate one token."""
    folder = tmp_path_factory.mktemp("gated")
    async with gated_stack(folder, change_gateway=shortened) as (stack, let_tokens_be_made):
        yield stack, lambda: let_tokens_be_made(1)


async def test_big_tensors_pass_after_idle_gaps(gated):
    stack, let_one_token_be_made = gated
    request = text_request("storyteller", "Once", max_tokens=1)
    # About as long as a connection may be idle, so that it is closed while a call begins; and longer than every limit.
    gaps_s = [0, *(CONNECTION_S + step for step in (-0.05, 0, 0.05)), STREAM_S + 0.5]
    async with channel(stack.gateway) as for_text, channel(stack.gateway, "predictor") as for_tensors:
        for gap_s in gaps_s:
            await asyncio.sleep(gap_s)
            let_one_token_be_made()
            await GRPCInferenceServiceStub(for_text).ModelInfer(request)
            ready = inference_pb2.ModelReadyRequest(name="storyteller")
            assert (await GRPCInferenceServiceStub(for_tensors).ModelReady(ready)).ready
            let_one_token_be_made()
            body = {"text_input": "Once", "max_tokens": 1}
            answer = await rest(stack.gateway, "POST", "/v2/models/storyteller/generate", body)
            assert answer.status == 200, answer.body


async def test_a_stream_outlives_every_idle_limit(gated):
    stack, let_one_token_be_made = gated
    silence_s = 0.6 * STREAM_S  # Six minutes of the ten that are allowed.
    tokens = 4
    may_ask = asyncio.Event()

    async def asks_late():
        await may_ask.wait()
        yield text_request("storyteller", "Once", max_tokens=1)

    async with channel(stack.gateway) as open_channel:
        # Silent from its beginning, like a client that has no request yet.
        late = GRPCInferenceServiceStub(open_channel).ModelStreamInfer(asks_late())
        tail = headrace_pb2_grpc.PayloadLogStub(open_channel).Tail(headrace_pb2.TailPayloadsRequest())
        stream = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(
            headrace_pb2.GenerateRequest(model="storyteller", prompt="Once", max_tokens=tokens, ignore_eos=True)
        )
        for _ in range(tokens):
            await asyncio.sleep(silence_s)
            let_one_token_be_made()
            assert len((await stream.read()).token_ids) == 1
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert (await tail.read()).finish_reason == "length"

        may_ask.set()
        let_one_token_be_made()
        answer = await late.read()
        assert not answer.error_message
