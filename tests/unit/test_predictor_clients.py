"""A predictor serves a client only the models that its key allows, and shows it no others.

The gateway sets the client's name. The transformer, whose calls carry its mark, has checked its own caller.
"""

from types import SimpleNamespace

import pytest

from headrace.clients import CLIENT, POLICY
from headrace.errors import ForbiddenError, NotFoundError
from headrace.oip.model_description import ModelDescription
from headrace.payload.call import RECORDED
from headrace_predictor.repository.entry import State
from headrace_predictor.servicer import InferenceServicer
from headrace_protos import inference_pb2 as pb

ALICE = ((CLIENT, "alice"), (POLICY, '{"models":["small"]}'))
MODELS = ("small", "large")


class FakeServing:
    def __init__(self, name):
        self.model = SimpleNamespace(name=name, description=ModelDescription("p", [], []))

    async def infer(self, request, caller):
        return pb.ModelInferResponse(model_name=request.model_name)

    async def stream(self, request, caller):
        yield pb.ModelInferResponse(model_name=request.model_name)

    def statistics(self):
        return pb.ModelStatistics(name=self.model.name)


class FakeRepository:
    served = tuple(map(FakeServing, MODELS))

    def get(self, name, version=""):
        for serving in self.served:
            if serving.model.name == name:
                return serving
        raise NotFoundError(f"no model {name!r}")

    def is_ready(self, name, version):
        return name in MODELS

    def source(self, name):
        return "folder"

    def base(self, name):
        return None

    async def index(self):
        return [SimpleNamespace(name=name, state=State.READY, reason="") for name in MODELS]


class FakeContext:
    def __init__(self, metadata):
        self._metadata = metadata

    def invocation_metadata(self):
        return self._metadata

    def time_remaining(self):
        return None


SERVICER = InferenceServicer(FakeRepository())


async def each(request):
    yield request


async def infer(name, metadata):
    answer = await SERVICER.ModelInfer(pb.ModelInferRequest(model_name=name), FakeContext(metadata))
    return answer.model_name


async def stream(name, metadata):
    requests = each(pb.ModelInferRequest(model_name=name))
    metadata = (*metadata, ("triton_grpc_error", "true"))
    answers = [answer async for answer in SERVICER.ModelStreamInfer(requests, FakeContext(metadata))]
    return answers[0].infer_response.model_name


async def describe(name, metadata):
    return (await SERVICER.ModelMetadata(pb.ModelMetadataRequest(name=name), FakeContext(metadata))).name


async def configure(name, metadata):
    return (await SERVICER.ModelConfig(pb.ModelConfigRequest(name=name), FakeContext(metadata))).config.name


async def count(name, metadata):
    answer = await SERVICER.ModelStatistics(pb.ModelStatisticsRequest(name=name), FakeContext(metadata))
    return answer.model_stats[0].name


async def is_ready(name, metadata):
    return name * (await SERVICER.ModelReady(pb.ModelReadyRequest(name=name), FakeContext(metadata))).ready


WAYS = (infer, stream, describe, configure, count, is_ready)


@pytest.mark.parametrize("ask", WAYS)
async def test_a_key_is_for_its_models_and_without_one_and_for_the_transformer_all_are_served(ask):
    assert await ask("small", ALICE) == "small"
    for name in ("large", "unknown"):
        with pytest.raises(ForbiddenError, match=f"the key of alice does not allow the model {name}"):
            await ask(name, ALICE)
    for metadata in ((), (*ALICE, RECORDED)):
        assert await ask("large", metadata) == "large"


async def test_lists_have_only_the_models_that_the_client_may_use():
    context = FakeContext(ALICE)
    index = await SERVICER.RepositoryIndex(pb.RepositoryIndexRequest(), context)
    statistics = await SERVICER.ModelStatistics(pb.ModelStatisticsRequest(), context)
    assert [model.name for model in index.models] == ["small"]
    assert [model.name for model in statistics.model_stats] == ["small"]
