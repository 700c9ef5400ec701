"""Several replicas are presented as one: a model is what its best replica is, and counts are added up."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from headrace.deadline import NO_DEADLINE
from headrace.errors import HeadraceError, HopBrokenError, NotReadyError
from headrace_protos import inference_pb2 as pb
from headrace_transformer.predictors.discovery import replicas as module
from headrace_transformer.predictors.discovery import resolver
from headrace_transformer.predictors.discovery.replicas import ModelState, Replicas, merged, summed
from headrace_transformer.predictors.oip.client import PredictorClient
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, serving
from tests.waiting import HANG_S


def table(**states):
    return {name: ModelState(state, "broken" if state == "UNAVAILABLE" else "", "1") for name, state in states.items()}


@pytest.mark.parametrize(
    ("one", "other", "state", "reason"),
    [
        ("READY", table(a="READY"), "READY", ""),
        ("READY", table(a="LOADING"), "READY", "1 of 2 replicas lack it"),
        ("READY", table(a="UNAVAILABLE"), "READY", "1 of 2 replicas lack it: broken"),
        ("READY", table(), "READY", "1 of 2 replicas lack it"),
        ("LOADING", table(a="UNAVAILABLE"), "LOADING", ""),
        ("LOADING", table(), "LOADING", ""),
        ("UNAVAILABLE", table(), "UNAVAILABLE", "broken"),
    ],
)
def test_a_model_is_what_its_best_replica_is(one, other, state, reason):
    for tables in ([table(a=one), other], [other, table(a=one)]):
        model = merged(tables)["a"]
        assert (model.state, model.reason) == (state, reason)


def test_counts_of_replicas_are_added_up():
    def statistics(count, last):
        one = pb.ModelStatistics(name="m", version="1", last_inference=last, inference_count=count)
        one.inference_stats.success.count = count
        one.inference_stats.success.ns = 10 * count
        one.inference_stats.fail.SetInParent()
        one.response_stats["0"].success.count = count
        one.batch_stats.add(batch_size=2).compute_infer.count = count
        one.memory_usage.add(type="CPU", byte_size=5)
        return pb.ModelStatisticsResponse(model_stats=[one])

    (total,) = summed([statistics(3, 20), statistics(4, 10)]).model_stats
    assert (total.name, total.version, total.inference_count, total.last_inference) == ("m", "1", 7, 20)
    assert (total.inference_stats.success.count, total.inference_stats.success.ns) == (7, 70)
    assert total.inference_stats.HasField("fail")
    assert total.response_stats["0"].success.count == 7
    assert [(batch.batch_size, batch.compute_infer.count) for batch in total.batch_stats] == [(2, 7)]
    assert [usage.byte_size for usage in total.memory_usage] == [5, 5]


# ------------------------------------------------------------------ replicas that come and go


@asynccontextmanager
async def replicas_at(monkeypatch, *addresses):
    """Replicas behind one name, and the list of its present addresses."""
    known = list(addresses)

    async def resolve(address):
        await asyncio.sleep(random.random() / 100)  # Like a name service, which answers in any order.
        return list(known)

    monkeypatch.setattr(resolver, "_resolve", resolve)
    client = PredictorClient("127.0.0.1:1")
    replicas = Replicas(["predictor:9000"], client)
    try:
        yield replicas, known
    finally:
        await replicas.close()
        await client.close()


async def test_a_scale_down_amid_many_calls_fails_none(monkeypatch):
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", HANG_S)  # A probe that is late fails, on a busy machine too.
    async with AsyncExitStack() as stack:
        everyone = [await stack.enter_async_context(serving(ScriptedPredictor())) for _ in range(4)]
        replicas, known = await stack.enter_async_context(replicas_at(monkeypatch, *everyone))

        async def ask():
            for _ in range(20):
                assert set(await replicas.index()) == {MODEL}

        asking = asyncio.gather(*(ask() for _ in range(8)))
        while not asking.done():
            known[:] = random.sample(everyone, random.randint(1, 4))
            await asyncio.sleep(0.003)
        await asking


async def test_what_a_replica_had_is_loading_while_it_is_away_and_missing_once_it_is_unloaded():
    first, second = ScriptedPredictor(models=("one",)), ScriptedPredictor(models=("other", "third"))
    client = PredictorClient("127.0.0.1:1")
    async with serving(first, healthy=("", "ready")) as here:
        async with AsyncExitStack() as stack:
            there = await stack.enter_async_context(serving(second, healthy=("",)))
            replicas = Replicas([there, here], client)
            index = await replicas.index()
            assert {name: model.state for name, model in index.items()} == dict.fromkeys(
                ("one", "other", "third"), "READY"
            )
            assert [(await replicas.describe(name)).name for name in ("one", "other")] == ["one", "other"]
            assert await replicas.ready()  # One of them is.
        for _ in range(2):
            index = await replicas.index()
            assert {name: model.state for name, model in index.items()} == {
                "one": "READY",
                "other": "LOADING",
                "third": "LOADING",
            }
        with suppress(HeadraceError):  # The fake has no such method.
            await replicas.unload(pb.RepositoryModelUnloadRequest(model_name="third"), NO_DEADLINE)
        assert set(await replicas.index()) == {"one", "other"}
        assert await replicas.ready()
    await replicas.close()
    await client.close()


class Hangs(ScriptedPredictor):
    async def RepositoryModelLoad(self, request, context):  # noqa: N802
        self.calls.append(request)
        await asyncio.Event().wait()


async def test_a_call_of_a_removed_replica_ends_with_an_error_and_not_as_a_cancel(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.1)
    leaves, stays = Hangs(), ScriptedPredictor()
    async with serving(leaves) as first, serving(stays) as second, replicas_at(monkeypatch, first) as (replicas, known):
        loading = asyncio.create_task(replicas.load(pb.RepositoryModelLoadRequest(model_name=MODEL), NO_DEADLINE))
        await leaves.wait_for_calls(1)
        known[:] = [second]
        assert set(await replicas.index()) == {MODEL}
        with pytest.raises(HopBrokenError):
            await loading
        assert set(await replicas.index()) == {MODEL}


async def test_a_call_of_replicas_is_cancelled_only_by_its_own_caller(monkeypatch):
    predictor = Hangs()
    async with serving(predictor) as address, replicas_at(monkeypatch, address) as (replicas, _):
        loading = asyncio.create_task(replicas.load(pb.RepositoryModelLoadRequest(model_name=MODEL), NO_DEADLINE))
        await predictor.wait_for_calls(1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading


async def test_a_model_is_described_by_a_replica_that_answers_while_the_way_through_envoy_is_closed():
    client = PredictorClient("127.0.0.1:1")  # No Envoy listens there.
    other, second = ScriptedPredictor(models=("other",)), ScriptedPredictor(models=(MODEL,))
    async with serving(second) as has_it, AsyncExitStack() as stack:
        lacks_it = await stack.enter_async_context(serving(other))
        left = await stack.enter_async_context(serving(ScriptedPredictor(models=(MODEL,))))
        replicas = Replicas([lacks_it, left, has_it], client)
        assert set(await replicas.index()) == {MODEL, "other"}
        await stack.aclose()
        assert (await replicas.metadata(pb.ModelMetadataRequest(name=MODEL))).name == MODEL
        assert (await replicas.config(pb.ModelConfigRequest(name=MODEL))).config.name == MODEL
        with pytest.raises(NotReadyError):
            await replicas.metadata(pb.ModelMetadataRequest(name="other"))
    await replicas.close()
    await client.close()
