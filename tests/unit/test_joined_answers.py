"""Small answers of a stream that are ready together become one message, in order, for a caller that supports it;
any other caller gets each by itself."""

import asyncio

import pytest
from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.oip.stream_infer import may_join, multiplex, separate
from headrace_protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse


def response(number, elements=1, datatype="INT64"):
    made = ModelInferResponse(id=str(number))
    made.outputs.add(name="n", datatype=datatype, shape=[elements])
    made.raw_output_contents.append(bytes(8 * elements))
    return made


def answered(number, **more):
    return ModelStreamInferResponse(infer_response=response(number, **more))


def ids_of(message):
    return [
        ModelStreamInferResponse.FromString(each).infer_response.id for each in separate(message.SerializeToString())
    ]


async def one(request):
    yield request


async def messages(answer, joins=True, as_status=False):
    """The ids in each message of a call whose reader lets everything get ready between two messages."""
    requests, found = one(ModelInferRequest(model_name="m")), []
    async for message in multiplex(requests, answer, as_status, joins):
        found.append(ids_of(message))
        for _ in range(100):
            await asyncio.sleep(0)
    return found


async def test_answers_that_are_ready_together_are_one_message():
    async def answer(_):
        for number in range(6):
            yield response(number)

    assert await messages(answer) == [list("012345")]
    assert await messages(answer, joins=False) == [[number] for number in "012345"]


async def test_a_large_answer_is_a_message_of_its_own_in_its_place():
    async def answer(_):
        for number in range(5):
            yield response(number, elements=100_000 if number == 3 else 1)

    assert await messages(answer) == [["0", "1", "2"], ["3"], ["4"]]


async def test_a_single_answer_does_not_wait():
    go_on = asyncio.Event()

    async def answer(_):
        yield response(0)
        await go_on.wait()
        yield response(1)

    stream = multiplex(one(ModelInferRequest()), answer, False, True)
    assert ids_of(await anext(stream)) == ["0"]
    go_on.set()
    assert ids_of(await anext(stream)) == ["1"]
    await stream.aclose()


async def test_an_error_comes_after_the_answers_before_it():
    async def answer(_):
        for number in range(3):
            yield response(number)
        raise InvalidRequestError("no more")

    stream = multiplex(one(ModelInferRequest()), answer, True, True)
    assert ids_of(await anext(stream)) == list("012")
    with pytest.raises(InvalidRequestError, match="no more"):
        await anext(stream)


def test_texts_and_large_answers_are_not_joined():
    assert may_join(answered(0))
    assert not may_join(answered(0, datatype="BYTES"))
    assert not may_join(answered(0, elements=10_000))
    padded = answered(0)
    padded.infer_response.parameters["long"].string_param = "x" * 10_000
    assert not may_join(padded)


def test_a_message_of_one_answer_stays_as_it_is():
    message = answered(1).SerializeToString()
    assert list(separate(message)) == [message]
    with pytest.raises(DecodeError):
        separate(b"\x7a\xff")
