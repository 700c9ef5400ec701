"""Many requests on one ModelStreamInfer call: matched by id, none delays another, errors in band."""

import asyncio
from contextlib import aclosing

import pytest

from headrace.errors import InvalidRequestError
from headrace.oip.stream_infer import EMPTY_FINAL, FINAL, multiplex
from headrace_protos.inference_pb2 import ModelInferRequest, ModelInferResponse


def request(name, empty_final=False):
    message = ModelInferRequest(model_name="m", id=name)
    if empty_final:
        message.parameters[EMPTY_FINAL].bool_param = True
    return message


async def sent(*requests):
    for message in requests:
        yield message


async def two_parts(message):
    if message.id == "bad":
        raise InvalidRequestError("no such thing")
    if message.id == "broken":
        raise RuntimeError("secret")
    for last in (False, True):
        response = ModelInferResponse(model_name=message.model_name, id=message.id)
        response.parameters[FINAL].bool_param = last
        yield response


async def collect(stream):
    return [response async for response in stream]


async def test_a_slow_request_does_not_delay_another():
    release = asyncio.Event()

    async def answer(message):
        if message.id == "slow":
            await release.wait()
        async for response in two_parts(message):
            yield response

    order = []
    async with aclosing(multiplex(sent(request("slow"), request("fast")), answer, False)) as responses:
        async for response in responses:
            order.append(response.infer_response.id)
            if len(order) == 2:
                release.set()
    assert order == ["fast", "fast", "slow", "slow"]


@pytest.mark.parametrize(("name", "text"), [("bad", "no such thing"), ("broken", "internal error")])
async def test_a_failing_request_leaves_the_stream_usable(name, text, caplog):
    responses = await collect(multiplex(sent(request(name), request("good")), two_parts, False))
    errors = [r for r in responses if r.error_message]
    assert [(r.error_message, r.infer_response.id) for r in errors] == [(text, name)]
    assert errors[0].infer_response.parameters[FINAL].bool_param
    assert [r.infer_response.id for r in responses if not r.error_message] == ["good", "good"]


async def test_an_error_ends_the_call_if_the_caller_asks_for_errors_as_status():
    with pytest.raises(InvalidRequestError):
        await collect(multiplex(sent(request("bad")), two_parts, True))


async def test_requests_that_cannot_be_read_end_the_call(caplog):
    async def broken():
        yield request("a")
        raise RuntimeError("the connection broke")

    with pytest.raises(Exception, match="internal error"):
        await asyncio.wait_for(collect(multiplex(broken(), two_parts, False)), 5)


async def test_a_request_that_fails_after_responses_ends_with_its_error_and_nothing_more():
    async def answer(message):
        async for response in two_parts(message):
            response.parameters[FINAL].bool_param = False
            yield response
        raise InvalidRequestError("too late")

    responses = await collect(multiplex(sent(request("a", empty_final=True)), answer, False))
    assert [r.error_message for r in responses] == ["", "", "too late"]
    assert [r.infer_response.parameters[FINAL].bool_param for r in responses] == [False, False, True]


async def test_requests_with_the_same_id_and_with_none_are_answered_each():
    responses = await collect(multiplex(sent(request("a"), request("a"), request("")), two_parts, False))
    assert sorted(response.infer_response.id for response in responses) == ["", "", "a", "a", "a", "a"]


async def test_a_reader_that_stops_holds_back_the_requests_of_its_own_call():
    made = []

    async def endless(message):
        while True:
            made.append(message.id)
            yield ModelInferResponse(id=message.id)

    async with aclosing(multiplex(sent(request("a")), endless, False)) as responses:
        await anext(responses)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(made) < 40
