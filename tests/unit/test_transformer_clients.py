"""A transformer tells a client nothing of the models that its key does not allow."""

from types import SimpleNamespace

import pytest

from headrace.clients import CLIENT, POLICY
from headrace.errors import ForbiddenError
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.grpc.inference_servicer import InferenceServicer

ALICE = ((CLIENT, "alice"), (POLICY, '{"models":["small"]}'))
MODELS = ("small", "large")


class FakeRouter:
    def find(self, name, version=""):
        return SimpleNamespace(name=name)

    def is_ready(self, name, version):
        return True

    def lists(self, name):
        return True


class FakeReplicas:
    async def statistics(self, request):
        found = [request.name] if request.name else MODELS
        return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(name=name) for name in found])


def servicer():
    return InferenceServicer(
        inference=None, catalogue=None, router=FakeRouter(), predictor=None, replicas=FakeReplicas()
    )


def context(metadata):
    return SimpleNamespace(invocation_metadata=lambda: metadata)


async def is_ready(name, metadata):
    return (await servicer().ModelReady(pb.ModelReadyRequest(name=name), context(metadata))).ready


async def counts(name, metadata):
    answer = await servicer().ModelStatistics(pb.ModelStatisticsRequest(name=name), context(metadata))
    return [model.name for model in answer.model_stats]


@pytest.mark.parametrize("ask", [is_ready, counts])
async def test_readiness_and_statistics_are_of_the_models_of_a_key(ask):
    assert await ask("small", ALICE)
    assert await ask("large", ())
    with pytest.raises(ForbiddenError, match="the key of alice does not allow the model large"):
        await ask("large", ALICE)


async def test_statistics_of_all_models_are_those_of_a_key():
    assert await counts("", ALICE) == ["small"]
    assert await counts("", ()) == list(MODELS)
