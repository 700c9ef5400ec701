"""A client whose stream was cut continues at another gateway and transformer: nothing is lost, nothing comes twice.

The second stack has no predictor of its own, but those of the first.
"""

import asyncio
import http.client
import json
import random

import pytest
import pytest_asyncio

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.events import read_events
from tests.support.full import FULL
from tests.system.calls import channel, generate, http_request, records, rest, text_of
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
STREAMS = 200 if FULL else 12
AT_ONCE = 16
TOKENS, PACE = 40, 100
SIGNING_KEY = "of both stacks: the one continues what the other began"
EVENTS = {"accept": "text/event-stream"}
KINDS = (
    {"temperature": 0},
    {"temperature": 1.3, "seed": 11},
    {"temperature": 1.0},
    {"temperature": 1.5, "stop": [" the", "."]},
    {"temperature": 1.0, "logprobs": 2, "stream_options": {"include_usage": True}},
    {"temperature": 1.5, "stop": [" the", "."], "include_stop_str_in_output": True, "return_token_ids": True},
    {"temperature": 1.5, "logit_bias": {"4": 8}, "skip_special_tokens": False},
)


@pytest_asyncio.fixture(scope="module")
async def sides(stacks):
    """Two stacks with the same two predictors."""
    signed = {"TRANSFORMER_SIGNING_KEY": SIGNING_KEY}
    exact = {"predictor": {"PREDICTOR_DTYPE": "fp32"}, "transformer": signed}
    one = {"models": MODELS, "predictors": 2, "environment": exact}
    async with stacks.use(**one) as first:
        endpoints = ",".join(f"127.0.0.1:{port}" for port in first.settings.predictor_ports)
        limits = {"transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": "60"} | signed}
        async with stacks.use(models=MODELS, predictors=0, predictor_endpoints=endpoints, environment=limits) as second:
            yield first, second


def cut_stream(gateway, body, events, headers):
    """The first events of a stream, whose connection then breaks; blocks."""
    host, _, port = gateway.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json", **headers})
        response, came = connection.getresponse(), b""
        while len(read_events(came)) < events and (piece := response.read1(512)):
            came += piece
        assert response.status == 200, came
        return came
    finally:
        connection.close()


def answer_of(bodies):
    """Text, tokens of log probabilities, finish reason and end of an answer that came in several streams."""
    text, tokens, ends, heads = "", [], [], set()
    for event in [event for body in bodies for event in read_events(body)]:
        if event.data == "[DONE]":
            ends.append(event.data)
            continue
        chunk = json.loads(event.data)
        heads.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            text += choice["text"]
            logprobs = choice["logprobs"] or {"tokens": (), "token_logprobs": (), "text_offset": ()}
            tokens += zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
            tokens += choice.get("token_ids", ())
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        if not chunk["choices"]:
            ends.append(chunk["usage"]["completion_tokens"])
    assert len(heads) == 1
    return text, tokens, ends


async def cut_and_continued(sides, body, cuts, number):
    """An answer whose connection breaks after so many events each time."""
    headers, bodies = {**EVENTS, "idempotency-key": f"cut {number}"}, []
    for times, count in enumerate(cuts):
        side = sides[times % len(sides)]
        bodies.append(await asyncio.to_thread(cut_stream, side.gateway, body, count, headers))
        came = [event for body in bodies for event in read_events(body)]
        if came and came[-1].data == "[DONE]":
            return answer_of(bodies)
        if came:
            headers = {**EVENTS, "last-event-id": came[-1].id}
    last = await asyncio.to_thread(http_request, sides[-1].gateway, "POST", "/v1/completions", body, headers)
    assert last.status == 200, last.body
    return answer_of([*bodies, last.body])


async def test_streams_cut_at_random_continue_exactly_at_another_transformer(sides):
    """Against undisturbed ones with the same key."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    places = asyncio.Semaphore(AT_ONCE)

    async def check(number):
        body = {"model": "storyteller", "prompt": f"Once upon a time {number}", "max_tokens": TOKENS, "stream": True}
        body |= {"pace": PACE, "ignore_eos": True, **KINDS[number % len(KINDS)]}
        cuts = [source.randrange(1, TOKENS // 2) for _ in range(source.randint(1, 3))]
        async with places:
            came = await cut_and_continued(sides, body, cuts, number)
            key = {"idempotency-key": f"cut {number}"}
            whole = await asyncio.to_thread(http_request, sides[0].gateway, "POST", "/v1/completions", body, key)
        assert came == answer_of([whole.body]), (number, cuts)

    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(check(number))


@pytest.mark.full  # The short form: tests/process/test_transformer_reconnect.py.
async def test_generate_continues_at_another_gateway_by_grpc_and_by_rest(sides):
    first, second = sides
    fields = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    fields |= {"temperature": 1.2, "logprobs": True, "pace": 25}
    ids, text, logprobs = [], "", []
    async with channel(first.gateway) as open_channel:
        request = headrace_pb2.GenerateRequest(request_id="cut", **fields)
        stream = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request)
        async for response in stream:
            ids += response.token_ids
            logprobs += response.logprobs
            text += response.text
            if len(ids) >= 10:
                break
        stream.cancel()
    count, resume_id = len(ids), response.resume_id
    rest_of_it = await generate(second.gateway, request_id="continued", resume_from=resume_id, **fields)
    ids += [token_id for response in rest_of_it for token_id in response.token_ids]
    logprobs += [value for response in rest_of_it for value in response.logprobs]
    assert len(ids) == len(logprobs) == TOKENS
    assert rest_of_it[-1].usage.completion_tokens == TOKENS

    answer = await rest(second.gateway, "POST", "/headrace/v1/generate", fields | {"resume_from": resume_id})
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [i for line in lines for i in line.get("token_ids", ())] == ids[count:]
    assert "".join(line.get("text", "") for line in lines) == text_of(rest_of_it)

    # The record has what was computed: replay compares it token by token.
    [record] = await records(second.gateway, request_id="continued")
    assert [i for chunk in record.chunks for i in chunk.token_ids] == ids
    assert record.text == text + text_of(rest_of_it)
    assert json.loads(record.parameters)["resumes_after"] == count
    # The client of the first call left, which cancelled it.
    await until(lambda: was_cancelled(first, "cut"))


async def was_cancelled(stack, request_id):
    found = await records(stack.gateway, request_id=request_id)
    return [record.status for record in found] == ["CANCELLED"]
