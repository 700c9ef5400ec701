"""The transformer works before any server of the protocol: it relays, and generates for models of ids.

An answer that breaks the protocol is UNAVAILABLE and 502 with the predictor's name, never the caller's fault. Work that
all choices of a request share is done once, and a refused request causes none.
"""

import textwrap

import grpc
import numpy as np
import orjson
import pytest

from headrace.deadline import NO_DEADLINE
from headrace.oip.stream_infer import JOINS_ANSWERS, joined
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2 import ModelInferResponse, ModelStreamInferResponse
from headrace_transformer.generation import recording
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.text.tokenizer import TextTokenizer
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.status import code_of, refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request

TEXT = "ids=models/storyteller"
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def echo_request(**fields):
    request = pb.ModelInferRequest(**{"model_name": "echo", "id": "r", **fields})
    add_input(request, Tensor("x", "FP32", np.arange(4, dtype=np.float32)))
    return request


async def test_its_own_errors_keep_their_meaning():
    async with foreign_server(ForeignServer()) as address, transformer(address) as (stub, _):
        raised = await refusal(stub.ModelInfer(echo_request(model_name="nobody")), "nobody is not here")
        assert raised.code() is NOT_FOUND
        assert dict(raised.trailing_metadata())["x-failed-hop"] == "predictor"
        (response,) = [response async for response in stub.ModelStreamInfer(each(echo_request(model_name="nobody")))]
        assert (response.error_message, response.infer_response.id) == ("nobody is not here", "r")


async def test_text_is_converted_to_ids_in_the_form_of_the_metadata_and_back():
    server = ForeignServer()
    async with foreign_server(server) as address, transformer(address, TEXT) as (stub, catalogue):
        request = text_request("ids", "Once upon a time", max_tokens=60)
        responses = [response async for response in stub.ModelStreamInfer(each(request))]
        tensor = server.requests[0].inputs[0]
        assert (tensor.name, tensor.datatype, tensor.shape[0]) == ("input_ids", "INT64", 1)
        text = b"".join(decode_outputs(r.infer_response)["text_output"].array[0] for r in responses)
        assert text.decode().strip() == "Once upon a time"
        last = responses[-1].infer_response.parameters
        assert (last["finish_reason"].string_param, last["triton_final_response"].bool_param) == ("stop", True)
        # The metadata has no context length, so that of the model's files counts.
        assert catalogue.find("ids").limits.context_length == 1024
        assert not catalogue.find("ids").resumes

        shorter = await stub.ModelInfer(text_request("ids", "Once upon a time", max_tokens=2))
        assert shorter.parameters["finish_reason"].string_param == "length"
        # It would ignore the form of the answer.
        formed = text_request("ids", "Once upon a time")
        formed.parameters["structured_outputs"].string_param = '{"regex": "a"}'
        raised = await refusal(stub.ModelInfer(formed), "its predictor supports no structured_outputs")
        assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert all("structured_outputs" not in request.parameters for request in server.requests)


async def test_without_any_server_models_are_not_ready_instead_of_unknown():
    async with transformer("127.0.0.1:9", TEXT, ready=False, wait_s=0.2) as (stub, catalogue):
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        for name in ("ids", "nobody"):
            assert await code_of(stub.ModelInfer(text_request(name, "Once"))) is grpc.StatusCode.UNAVAILABLE
        assert not catalogue.ready


PASSES_ON = """
    from headrace.processor import Processor

    class PassesOn(Processor):
        model = "echo"

        def preprocess(self, request):
            return request.inputs
"""


def answer(datatype, shape, raw):
    response = pb.ModelInferResponse(model_name="m")
    response.outputs.add(name="output_ids", datatype=datatype, shape=shape)
    response.raw_output_contents.append(raw)
    return response


BROKEN = {
    "too few bytes": answer("INT64", [1, 1], bytes(7)),
    "more bytes than elements": answer("BYTES", [1], b"\x01\0\0\0ab"),
}
NO_IDS = {"numbers with a fraction": answer("FP32", [1, 1], bytes(4))}


class Broken(ForeignServer):
    def __init__(self, response):
        super().__init__()
        self.response = response

    async def ModelInfer(self, request, context):  # noqa: N802
        return self.response

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        async for _ in request_iterator:
            self.requests.append(_)
            yield pb.ModelStreamInferResponse(infer_response=self.response)


async def status_of(call):
    raised = await refusal(call)
    metadata = dict(raised.trailing_metadata())
    return raised.code(), metadata["x-http-status"], metadata["x-failed-hop"]


BROKEN_BY_PREDICTOR = (grpc.StatusCode.UNAVAILABLE, "502", "predictor")


@pytest.mark.parametrize("response", (BROKEN | NO_IDS).values(), ids=BROKEN | NO_IDS)
async def test_a_broken_answer_to_a_generation_is_the_predictors_fault(response):
    server = Broken(response)
    async with foreign_server(server) as address, transformer(address, TEXT) as (stub, _):
        assert await status_of(stub.ModelInfer(text_request("ids", "Once", max_tokens=2))) == BROKEN_BY_PREDICTOR
        (failed,) = [r async for r in stub.ModelStreamInfer(each(text_request("ids", "Once", max_tokens=2)))]
        assert "the predictor's" in failed.error_message
        assert len(server.requests) == 2  # The request is not repeated: the answer would be the same.


async def test_a_broken_answer_behind_a_processor_is_the_predictors_fault(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(PASSES_ON))
    request = pb.ModelInferRequest(model_name="mine")
    add_input(request, Tensor("x", "FP32", np.zeros(1, np.float32)))
    processors = f"mine={path}:PassesOn"
    server = Broken(BROKEN["too few bytes"])
    async with foreign_server(server) as address, transformer(address, processors=processors) as (stub, _):
        assert await status_of(stub.ModelInfer(request)) == BROKEN_BY_PREDICTOR


def answered(number):
    return ModelStreamInferResponse(infer_response=ModelInferResponse(id=str(number)))


class Joining(ForeignServer):
    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        async for _ in request_iterator:
            self.requests.append(JOINS_ANSWERS in tuple(context.invocation_metadata()))
            yield joined([answered(0), answered(1)])
            yield answered(2)


async def test_the_transformer_requests_joined_answers_and_separates_them():
    server = Joining()
    async with foreign_server(server) as address:
        client = PredictorClient(address)
        found = [each async for each in client.stream(b"", NO_DEADLINE)]
        await client.close()
    assert server.requests == [True]
    assert found == [answered(number).SerializeToString() for number in range(3)]


class Counted:
    """Replaces a function and counts its calls."""

    def __init__(self, monkeypatch, owner, name):
        self.calls = 0
        made = getattr(owner, name)

        def count(*arguments, **options):
            self.calls += 1
            return made(*arguments, **options)

        monkeypatch.setattr(owner, name, count)


@pytest.fixture
async def ask():
    """Sends completions to a transformer before a server whose model repeats its prompt."""
    async with foreign_server(ForeignServer()) as address, transformer(address, "ids=models/storyteller") as (stub, _):

        async def completions(**body):
            answer = await stub.openai("Completions", orjson.dumps({"model": "ids", "max_tokens": 2, **body}))
            return answer.status, orjson.loads(answer.data)

        yield completions


@pytest.fixture
def tokenised(monkeypatch):
    return Counted(monkeypatch, TextTokenizer, "encode")


@pytest.fixture
def recorded(monkeypatch):
    return Counted(monkeypatch, recording, "_recorded_prompt")


async def test_each_prompt_is_tokenised_and_recorded_once_for_all_its_choices(ask, tokenised, recorded):
    prompts = ["Once upon a time", "There was a fox", "A dog", "The sun"]
    _, answer = await ask(prompt=prompts, n=16)
    assert len(answer["choices"]) == 64
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    assert (tokenised.calls, recorded.calls) == (4, 4)
