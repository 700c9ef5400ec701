"""The payload log over REST, and Tail over REST and gRPC: each record as it is committed, under the same filters."""

import asyncio
import http.client
import json
import signal

import grpc
import pytest

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import channel, generate, rest
from tests.waiting import until

PAYLOADS = "/headrace/v1/payloads"


class RestTail:
    """An open call of Tail over HTTP/1.1."""

    def __init__(self, gateway, query):
        self._connection = http.client.HTTPConnection(gateway, timeout=30)
        self._connection.request("GET", f"{PAYLOADS}:tail?{query}")
        self.response = self._connection.getresponse()

    def next(self):
        return json.loads(self.response.readline())

    def close(self):
        self._connection.close()


def lines(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_query_and_get_agree_over_rest_and_grpc(stack):
    await generate(stack.gateway, model="storyteller", prompt="By REST", max_tokens=3, request_id="rest-log")

    async def query():
        return lines(await rest(stack.gateway, "GET", f"{PAYLOADS}?request_id=rest-log&status=OK&page_size=5"))

    await until(query)
    (found,) = await query()
    one = await rest(stack.gateway, "GET", f"{PAYLOADS}/{found['record_id']}")
    assert one.headers["content-type"] == "application/json"
    async with channel(stack.gateway) as open_channel:
        stub = headrace_pb2_grpc.PayloadLogStub(open_channel)
        record = await stub.Get(headrace_pb2.GetPayloadRequest(record_id=found["record_id"]))
    assert one.json["text"] == found["text"] == record.text
    assert one.json["usage"] == {"prompt_tokens": record.usage.prompt_tokens, "completion_tokens": 3}
    assert one.json["trace_id"] == record.trace_id
    assert lines(await rest(stack.gateway, "GET", f"{PAYLOADS}?model=never-asked-for")) == []


async def test_tail_sends_each_matching_record_as_it_is_committed(stack):
    by_rest = await asyncio.to_thread(RestTail, stack.gateway, "request_id=tailed&text_contains=seen")
    assert by_rest.response.getheader("content-type") == "application/x-ndjson"
    async with channel(stack.gateway) as open_channel:
        by_grpc = headrace_pb2_grpc.PayloadLogStub(open_channel).Tail(
            headrace_pb2.TailPayloadsRequest(request_id="tailed", text_contains="seen")
        )
        await by_grpc.initial_metadata()  # The call has begun.
        for prompt in ("seen 1", "passed over", "seen 2"):
            await generate(stack.gateway, model="storyteller", prompt=prompt, max_tokens=2, request_id="tailed")
        async with asyncio.timeout(20):
            prompts = [(await by_grpc.read()).prompt, (await by_grpc.read()).prompt]
            assert sorted(prompts) == ["seen 1", "seen 2"]
            records = [await asyncio.to_thread(by_rest.next) for _ in range(2)]
        assert [record["prompt"] for record in records] == prompts
        assert all(record["text"] and record["status"] == "OK" for record in records)
    by_rest.close()


async def test_a_tail_ends_with_a_reason_when_the_logger_stops(mended_stack):
    stack = mended_stack
    by_rest = await asyncio.to_thread(RestTail, stack.gateway, "")
    async with channel(stack.gateway) as open_channel:
        by_grpc = headrace_pb2_grpc.PayloadLogStub(open_channel).Tail(headrace_pb2.TailPayloadsRequest())
        await by_grpc.initial_metadata()
        await stack.kill("logger", signal.SIGTERM)
        async with asyncio.timeout(20):
            with pytest.raises(grpc.aio.AioRpcError, match="the logger is stopping") as failed:
                await by_grpc.read()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(failed.value.trailing_metadata())["x-failed-hop"] == "logger"
            assert await asyncio.to_thread(by_rest.next) == {"error": "the logger is stopping"}
    by_rest.close()
