"""Every call of a model and every refused one is recorded once, whether it reached a service or not."""

import json
import re
import uuid

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.system.calls import PACE, channel, generate, query, rest
from tests.waiting import until


async def the_record(stack, **filters):
    """The only record that passes the filters, once it is joined with the gateway's line."""
    (record,) = await until(
        lambda: query(stack.gateway, **filters), holds=lambda found: any(record.HasField("gateway") for record in found)
    )
    return record


def new_id():
    return str(uuid.uuid4())


async def test_the_record_of_a_grpc_call_has_the_gateways_fields(stack):
    request_id = new_id()
    await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=4, request_id=request_id)
    record = await the_record(stack, request_id=request_id)
    assert (record.status, record.prompt, record.protocol) == ("OK", "Once", "headrace.v1.TextGeneration/Generate")
    assert record.gateway.path == "/headrace.v1.TextGeneration/Generate"
    assert (record.gateway.http_status, record.gateway.response_flags) == (200, "-")
    assert record.gateway.upstream == stack.addresses["transformer"]
    assert record.gateway.request_bytes > 0
    assert [one.record_id for one in await query(stack.gateway, trace_id=record.trace_id)] == [record.record_id]


async def test_the_record_of_a_rest_call_has_the_gateways_fields(stack):
    request_id = new_id()
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 4, "stream": True}
    spoofed = {"x_request_id": request_id, "x_headrace_call_id": "mine", "x_headrace_client": "somebody"}
    assert (await rest(stack.gateway, "POST", "/v1/completions?key=secret", body, **spoofed)).status == 200
    record = await the_record(stack, request_id=request_id)
    assert (record.status, record.prompt, record.gateway.path) == ("OK", "Once", "/v1/completions")
    # A caller cannot set its own name or the call's id.
    assert record.client == ""
    assert re.fullmatch(r"\d{13}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", record.call_id)


async def test_an_unknown_path_is_recorded(stack):
    request_id = new_id()
    assert (await rest(stack.gateway, "GET", "/v1/nothing", x_request_id=request_id)).status == 404
    record = await the_record(stack, request_id=request_id)
    assert (record.status, record.failed_hop, record.protocol) == ("NOT_FOUND", "gateway", "/v1/nothing")
    assert (record.gateway.http_status, record.gateway.upstream) == (404, "")
    lines = (await rest(stack.gateway, "GET", f"/headrace/v1/payloads?request_id={request_id}")).body.splitlines()
    assert [json.loads(line)["gateway"]["http_status"] for line in lines] == [404]


async def test_a_caller_that_leaves_is_recorded_once(stack):
    request_id = new_id()
    async with channel(stack.gateway) as open_channel:
        request = headrace_pb2.GenerateRequest(
            model="storyteller", prompt="Once", max_tokens=1000, ignore_eos=True, pace=PACE, request_id=request_id
        )
        call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request)
        await call.read()
        call.cancel()
    record = await the_record(stack, request_id=request_id)
    assert (record.status, record.gateway.response_flags) == ("CANCELLED", "DR")
    assert record.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in record.chunks) > 0
    assert record.text == "".join(chunk.text for chunk in record.chunks)


async def test_a_record_can_be_deleted_over_rest_for_good(stack):
    request_id = new_id()
    await generate(stack.gateway, model="storyteller", prompt="Once", max_tokens=2, request_id=request_id)
    record = await the_record(stack, request_id=request_id)
    path = f"/headrace/v1/payloads/{record.record_id}"
    answers = [await rest(stack.gateway, "DELETE", path) for _ in range(2)]
    assert [(answer.status, answer.json.get("deleted", "0")) for answer in answers] == [(200, "1"), (200, "0")]
    assert (await rest(stack.gateway, "GET", path)).status == 404
    assert await query(stack.gateway, request_id=request_id) == []


async def test_probes_and_readers_of_the_log_are_not_recorded(stack):
    request_id = new_id()
    for path in ("/", "/v2/health/ready", "/v1/models", "/headrace/v1/payloads", "/headrace/v1/payloads?no_such=1"):
        await rest(stack.gateway, "GET", path, x_request_id=request_id)
    last = new_id()
    await rest(stack.gateway, "GET", "/v1/nothing", x_request_id=last)
    await the_record(stack, request_id=last)
    assert await query(stack.gateway, request_id=request_id) == []


async def test_a_call_without_a_transformer_is_recorded(stack):
    await stack.kill("transformer")
    refused = []

    async def is_refused():
        request_id = new_id()
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}
        answer = await rest(stack.gateway, "POST", "/v1/completions", body, x_request_id=request_id)
        if answer.status == 503:
            refused.append(request_id)
        return refused

    await until(is_refused)
    record = await the_record(stack, request_id=refused[0])
    assert (record.status, record.failed_hop) == ("UNAVAILABLE", "transformer")
    assert record.protocol == "headrace.rest.v1.OpenAI/Completions"
    # After a failed health check, and before: no service listens, which is a 503 as well.
    assert record.gateway.response_flags in ("UH", "URX,UF")
    assert record.gateway.upstream == ""
