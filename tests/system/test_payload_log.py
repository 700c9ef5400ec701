"""Every request leaves one record, whatever its end, without an effect on the stream."""

import json

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import channel, generate, rest, text_of
from tests.system.payload_log import query, records
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
    await until(lambda: query(stack.gateway, request_id="not-json"))
    (record,) = await query(stack.gateway, request_id="not-json")
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

    async def grown():
        return int((await usage())["completion_tokens"]) >= int(before["completion_tokens"]) + 5

    await until(grown)
    after = await usage()
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
