"""A predictor whose answer breaks the protocol: UNAVAILABLE and 502 with its name, never the caller's fault."""

import textwrap

import grpc
import numpy as np
import pytest

from headrace.oip.tensors import Tensor, add_input, bytes_tensor
from headrace_protos import inference_pb2 as pb
from headrace_transformer.predictors.oip.answers import BrokenAnswerError, outputs_of
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request

TEXT = "ids=models/storyteller"
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
    "an unknown datatype": answer("INT63", [1, 1], bytes(8)),
    "a negative shape": answer("INT64", [-1], bytes(8)),
    "more bytes than elements": answer("BYTES", [1], b"\x01\0\0\0ab"),
}
NO_IDS = {
    "numbers with a fraction": answer("FP32", [1, 1], bytes(4)),
    "texts": answer("BYTES", [1], b"\x01\0\0\0a"),
}


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
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    metadata = dict(raised.value.trailing_metadata())
    return raised.value.code(), metadata["x-http-status"], metadata["x-failed-hop"]


BROKEN_BY_PREDICTOR = (grpc.StatusCode.UNAVAILABLE, "502", "predictor")


@pytest.mark.parametrize("response", (BROKEN | NO_IDS).values(), ids=BROKEN | NO_IDS)
async def test_a_broken_answer_to_a_generation_is_the_predictors_fault(response):
    server = Broken(response)
    async with foreign_server(server) as address, transformer(address, TEXT) as (stub, _):
        assert await status_of(stub.ModelInfer(text_request("ids", "Once", max_tokens=2))) == BROKEN_BY_PREDICTOR
        (failed,) = [r async for r in stub.ModelStreamInfer(each(text_request("ids", "Once", max_tokens=2)))]
        assert "the predictor's" in failed.error_message
        assert len(server.requests) == 2  # The request is not repeated: the answer would be the same.


@pytest.mark.parametrize("response", BROKEN.values(), ids=BROKEN)
async def test_a_broken_answer_behind_a_processor_is_the_predictors_fault(response, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(PASSES_ON))
    request = pb.ModelInferRequest(model_name="mine")
    add_input(request, Tensor("x", "FP32", np.zeros(1, np.float32)))
    processors = f"mine={path}:PassesOn"
    async with foreign_server(Broken(response)) as address, transformer(address, processors=processors) as (stub, _):
        assert await status_of(stub.ModelInfer(request)) == BROKEN_BY_PREDICTOR


@pytest.mark.parametrize("response", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_with_tensors_is_the_predictors_fault(response):
    with pytest.raises(BrokenAnswerError) as raised:
        outputs_of(response, response.raw_output_contents)
    assert raised.value.hop == "predictor"


async def test_many_texts_in_a_processor_do_not_block_other_requests(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(PASSES_ON))
    request = pb.ModelInferRequest(model_name="mine")
    add_input(request, bytes_tensor("x", [b"%d" % number for number in range(10_000)]))
    processors = f"mine={path}:PassesOn"
    async with foreign_server(ForeignServer()) as address, transformer(address, processors=processors) as (stub, _):
        passed = await stub.ModelInfer(request)
        assert list(passed.raw_output_contents) == list(request.raw_input_contents)
