"""No request body blocks the event loop, on any protocol."""

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody

from headrace_protos import inference_pb2 as pb
from headrace_protos.rest_pb2 import ModelBody
from headrace_protos.rest_pb2_grpc import OpenInferenceStub
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.full import FULL
from tests.support.loop_lag import loop_lag
from tests.support.transformer_fixtures import transformer

# Parsing would block it for seconds; copying the message is all that remains.
MAX_LAG_S = 0.5
ATTEMPTS = 3
OK, INVALID, TOO_LARGE = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


def listed(item, size):
    """A JSON list of `size` bytes."""
    return b"[" + (item + b",") * (size // (len(item) + 1)) + item + b"]"


def completion(**fields):
    return b'{"model":"ids",' + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def settings(size):
    return b"{" + b",".join(b'"%07d":"1"' % number for number in range(size // 14)) + b"}"


FOUR = b'["Once","upon","a","time"]'
MESSAGE = b'{"role":"user","content":"%s"}'
TENSOR = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":%s}]}'
# method, body; each is refused
OPENAI = {
    "stop strings": ("Completions", completion(prompt=FOUR, n=b"16", stop=listed(b'"ab"', 7_500_000))),
    "stop tokens": ("Completions", completion(prompt=FOUR, n=b"16", stop_token_ids=listed(b"7", 7_500_000))),
    "prompts of ids": ("Completions", completion(prompt=listed(listed(b"7", 120_000), 7_000_000))),
    "a prompt": ("Completions", completion(prompt=b'"%s"' % (b"a " * 3_700_000), n=b"16")),
    "messages": ("ChatCompletions", completion(messages=listed(MESSAGE % (b"x" * 1800), 7_000_000), n=b"8")),
    "template variables": (
        "ChatCompletions",
        completion(
            messages=listed(MESSAGE % b"x", 1), n=b"16", chat_template_kwargs=b'{"a":%s}' % listed(b"[]", 7_000_000)
        ),
    ),
    "inputs": ("Embeddings", completion(input=listed(listed(b"17", 1_000), 2_000_000))),
}
V2 = {
    "lists": ("Infer", ModelBody(model="echo"), TENSOR % listed(b"[]", 20_000_000), INVALID),
    "text": ("Generate", ModelBody(model="ids"), b'{"text_input":"%s"}' % (b"a " * 10_000_000), INVALID),
    "stop": ("Generate", ModelBody(model="ids"), b'{"text_input":"a","stop":%s}' % listed(b'"a"', 20_000_000), INVALID),
    "load": ("RepositoryLoad", ModelBody(model="x"), b'{"parameters":%s}' % settings(20_000_000), TOO_LARGE),
}


@pytest.fixture
async def served():
    """The stubs of a transformer before a server whose models repeat their inputs."""
    async with foreign_server(ForeignServer()) as address, transformer(address, "ids=models/storyteller") as (stub, _):
        yield stub


async def lag_of(call):
    """The longest time that the event loop was blocked while a call was answered, and the call's status: gRPC's, or
    the number that it returns."""
    async with loop_lag() as lag:
        try:
            answer = await call
            code = answer if isinstance(answer, int) else OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
    return lag.longest_s, code


async def assert_not_blocked(make, status):
    lags = []
    for _ in range(ATTEMPTS):
        lag_s, code = await lag_of(make())
        assert code == status
        lags.append(lag_s)
        if lag_s < MAX_LAG_S:
            return
    raise AssertionError(f"the event loop was held for {lags} s")


@pytest.mark.full  # The short form: the bodies of the V2 protocol below.
async def test_reading_the_largest_bodies_of_openais_api_does_not_block_it(served):
    for method, body in OPENAI.values():

        async def answered(method=method, body=body):
            return (await served.openai(method, body)).status

        await assert_not_blocked(answered, 400)


async def test_reading_large_bodies_of_the_v2_protocol_does_not_block_it(served):
    for method, request, body, status in (V2[name] for name in V2 if FULL or name != "stop"):
        call = getattr(OpenInferenceStub(served.channel), method)
        message = ModelBody(model=request.model, body=HttpBody(data=body))

        async def answered(call=call, message=message):
            await call(message)

        await assert_not_blocked(answered, status)


async def test_large_bodies_are_answered_like_small_ones(served):
    """JSON that other processes read and write is returned unchanged."""
    numbers = ",".join(f"{number}.5" for number in range(300_000)).encode()
    body = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[300000],"data":[%s]}]}' % numbers
    stub = OpenInferenceStub(served.channel)
    answer = await stub.Infer(ModelBody(model="echo", body=HttpBody(data=body)))
    assert b'"data":[%s]' % numbers in answer.data
    text = b"Once upon a time " * 5000
    answer = await stub.Generate(ModelBody(model="echo", body=HttpBody(data=b'{"x":"%s"}' % text)))
    assert b'"x":"%s"' % text in answer.data
    assert (await served.ServerLive(pb.ServerLiveRequest())).live
