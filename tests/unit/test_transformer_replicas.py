"""Several replicas are told as one: a model is there where all have it, and counts are added up."""

import pytest

from millrace.protos import inference_pb2 as pb
from services.transformer.replicas import ModelState, merged
from services.transformer.statistics import summed


def index(**states):
    response = pb.RepositoryIndexResponse()
    for name, state in states.items():
        response.models.add(name=name, version="1", state=state, reason="broken" if state == "UNAVAILABLE" else "")
    return response


def test_one_replica_speaks_for_itself():
    assert merged([index(a="READY", b="UNAVAILABLE")]) == {
        "a": ModelState("READY", "", "1"),
        "b": ModelState("UNAVAILABLE", "broken", "1"),
    }


@pytest.mark.parametrize(
    ("other", "state", "reason"),
    [
        (index(a="READY"), "READY", ""),
        (index(a="LOADING"), "LOADING", "1 of 2 replicas lack it"),
        (index(a="UNAVAILABLE"), "UNAVAILABLE", "1 of 2 replicas lack it: broken"),
        (index(), "UNAVAILABLE", "1 of 2 replicas lack it"),
    ],
)
def test_a_model_is_ready_where_every_replica_has_it(other, state, reason):
    told = merged([index(a="READY"), other])["a"]
    assert (told.state, told.reason) == (state, reason)


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


def test_models_and_versions_are_kept_apart():
    def one(name, version):
        return pb.ModelStatisticsResponse(
            model_stats=[pb.ModelStatistics(name=name, version=version, inference_count=1)]
        )

    totals = summed([one("a", "1"), one("a", "2"), one("b", "1"), one("a", "1")]).model_stats
    assert {(each.name, each.version): each.inference_count for each in totals} == {
        ("a", "1"): 2,
        ("a", "2"): 1,
        ("b", "1"): 1,
    }
