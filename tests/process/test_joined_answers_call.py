"""The transformer requests joined answers of a predictor, and passes each on by itself."""

from headrace.deadline import NO_DEADLINE
from headrace.oip.stream_infer import JOINS_ANSWERS, joined
from headrace_protos.inference_pb2 import ModelInferResponse, ModelStreamInferResponse
from headrace_transformer.predictors.oip.client import PredictorClient
from tests.process.foreign_server import ForeignServer, foreign_server


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
