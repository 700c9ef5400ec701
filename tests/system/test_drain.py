"""SIGTERM at the transformer: a stream that outlasts the drain ends with an error, which its record has."""

import asyncio
import json
import signal

import grpc

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.status import refusal
from tests.system.calls import channel, http_request
from tests.system.gated_stack import gated_stack
from tests.waiting import until


async def test_a_stream_that_outlasts_the_drain_of_the_transformer_is_recorded_as_its_caller_read_it(tmp_path):
    async with gated_stack(tmp_path, transformer={"TRANSFORMER_DRAIN_S": "1"}) as (stack, make_tokens):
        fields = {"model": "storyteller", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
        request = headrace_pb2.GenerateRequest(**fields, request_id="by gRPC")
        body = {**fields, "stream": True}
        headers, came = {"x-request-id": "by REST"}, asyncio.Event()
        loop = asyncio.get_running_loop()
        arguments = (stack.gateway, "POST", "/v1/completions", body, headers)
        rest = asyncio.create_task(
            asyncio.to_thread(http_request, *arguments, lambda: loop.call_soon_threadsafe(came.set))
        )
        async with channel(stack.gateway) as open_channel:
            call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request)
            both = asyncio.gather(call.read(), came.wait())
            while not both.done():  # A call that reaches the predictor late misses the first tokens.
                make_tokens(1)
                await asyncio.wait((both,), timeout=0.1)
            assert all(both.result())
            await stack.kill("transformer", signal.SIGTERM)
            ended = await refusal(rest_of(call))
            assert (ended.code(), ended.details()) == (grpc.StatusCode.UNAVAILABLE, "the service is stopping")
        assert "the service is stopping" in json.loads((await rest).events[-1])["error"]["message"]

        async with channel(stack.gateway) as open_channel:
            log = headrace_pb2_grpc.PayloadLogStub(open_channel)
            for request_id in ("by gRPC", "by REST"):
                record = await recorded(log, request_id)
                end = (record.status, record.message, record.failed_hop)
                assert end == ("UNAVAILABLE", "the service is stopping", "transformer")


async def rest_of(call):
    """Reads to the end of a stream, whose status comes after every message."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def recorded(log, request_id):
    """The record of a request, once it is stored."""

    async def found():
        return [record async for record in log.Query(headrace_pb2.QueryPayloadsRequest(request_id=request_id))]

    return (await until(found, holds=lambda records: records and records[0].status))[0]
