"""Every request leaves one record, whatever its end; queries and Tail give it by REST and gRPC."""

import asyncio
import http.client
import json
import signal

import grpc

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.status import refusal
from tests.system.calls import channel, generate, query, records, rest, text_of
from tests.waiting import until


async def test_an_answer_is_recorded_as_its_caller_got_it(stack):
    responses = await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=12, request_id="kept")
    (record,) = await records(stack.gateway, request_id="kept")
    assert (record.model, record.prompt, record.status) == ("storyteller", "Once", "OK")
    assert record.text == text_of(responses)
    assert [chunk.text for chunk in record.chunks] == [response.text for response in responses]
    assert record.usage == responses[-1].usage
    assert record.finish_reason == responses[-1].finish_reason
    assert 0 < record.ttft_ms <= record.duration_ms
    assert 0 < record.engine_ms < record.duration_ms
    assert len(record.trace_id) == 32
    assert record.protocol == "headrace.v1.TextGeneration/Generate"
    async with channel(stack.gateway) as open_channel:
        stub = headrace_pb2_grpc.PayloadLogStub(open_channel)
        assert (await stub.Get(headrace_pb2.GetPayloadRequest(record_id=record.record_id))).text == record.text


async def test_a_body_that_is_not_json_is_recorded(stack):
    await rest(stack.gateway, "POST", "/v1/completions", b"{", x_request_id="not-json")
    (record,) = await until(lambda: query(stack.gateway, request_id="not-json"))
    assert (record.status, record.protocol) == ("INVALID_ARGUMENT", "headrace.rest.v1.OpenAI/Completions")


async def test_usage_grows_by_the_tokens_of_an_answer(stack):
    async def usage(query="?group=model&model=storyteller"):
        answer = await rest(stack.gateway, "GET", f"/headrace/v1/usage{query}")
        assert answer.status == 200, answer.body
        [group] = json.loads(answer.body)["groups"]
        return group

    responses = await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=3, request_id="used")
    await records(stack.gateway, request_id="used")
    before = await usage()
    assert before["model"] == "storyteller"
    assert int(before["requests"]) >= 1
    await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=5, ignore_eos=True)
    expected = int(before["completion_tokens"]) + 5
    after = await until(usage, holds=lambda group: int(group["completion_tokens"]) >= expected)
    assert int(after["prompt_tokens"]) >= int(before["prompt_tokens"]) + responses[-1].usage.prompt_tokens
    assert after["seconds"] > before["seconds"]
    assert after["seconds"] < after["duration_seconds"]
    assert await usage("?group=&since=2020-01-01T00:00:00Z&until=2020-02-01T00:00:00Z") == {
        **dict.fromkeys(("requests", "failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens"), "0"),
        **dict.fromkeys(("seconds", "duration_seconds"), 0),
    }
    assert (await rest(stack.gateway, "GET", "/headrace/v1/usage?group=none")).status == 400
    # Calls of the log are not recorded.
    assert not [one for one in await query(stack.gateway, page_size=1000) if "usage" in one.gateway.path]


PAYLOADS = "/headrace/v1/payloads"


class RestTail:
    """An open call of Tail over HTTP/1.1."""

    def __init__(self, gateway, query):
        self._connection = http.client.HTTPConnection(gateway, timeout=60)
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
    path = f"{PAYLOADS}?request_id=rest-log&status=OK&page_size=5"
    (found,) = lines(await until(lambda: rest(stack.gateway, "GET", path), holds=lines))
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
        prompts = [(await by_grpc.read()).prompt, (await by_grpc.read()).prompt]
        assert sorted(prompts) == ["seen 1", "seen 2"]
        records = [await asyncio.to_thread(by_rest.next) for _ in range(2)]
        assert [record["prompt"] for record in records] == prompts
        assert all(record["text"] and record["status"] == "OK" for record in records)
    by_rest.close()


async def test_a_tail_ends_with_a_reason_when_the_logger_stops(stack):
    by_rest = await asyncio.to_thread(RestTail, stack.gateway, "")
    async with channel(stack.gateway) as open_channel:
        by_grpc = headrace_pb2_grpc.PayloadLogStub(open_channel).Tail(headrace_pb2.TailPayloadsRequest())
        await by_grpc.initial_metadata()
        await stack.kill("logger", signal.SIGTERM)
        failed = await refusal(by_grpc.read(), "the logger is stopping")
        assert failed.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(failed.trailing_metadata())["x-failed-hop"] == "logger"
        assert await asyncio.to_thread(by_rest.next) == {"error": "the logger is stopping"}
    by_rest.close()
