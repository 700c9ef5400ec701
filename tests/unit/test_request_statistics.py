"""ModelStatistics counts every request once and every response by its index, in bounded space."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace.oip.model_description import ModelDescription
from headrace.oip.stream_infer import EMPTY_FINAL, FINAL
from headrace.oip.tensors import Tensor, add_input, add_output
from headrace_predictor.engine.interface import RequestCounts
from headrace_predictor.models.served_model import Caller
from headrace_predictor.repository.lease import Serving
from headrace_protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.waiting import until


class FakeModel:
    """Sends as many responses as the number in the request's id; "bad" is refused, "waits" sends one and waits."""

    name = "fake"

    def __init__(self, max_batch_size=0):
        self.description = ModelDescription("fake", max_batch_size=max_batch_size)
        # Counts of the time before the model is served.
        self.statistics = RequestCounts(steps=3, succeeded=1, queue_ns=5, compute_ns=7)
        self.request_ids = []

    async def infer(self, request, caller=None):
        async with aclosing(self.stream(request)) as responses:
            return [response async for response in responses][-1]

    async def stream(self, request, caller=None):
        self.request_ids.append(request.id)
        if request.id == "bad":
            raise InvalidRequestError("bad")
        count = int(request.id) if request.id.isdigit() else 1
        for i in range(count):
            response = ModelInferResponse()
            add_output(response, Tensor("i", "INT64", np.array([i])))
            response.parameters[FINAL].bool_param = i == count - 1 and request.id.isdigit()
            yield response
        if request.id == "waits":
            await asyncio.Event().wait()
        if request.id == "fails":
            raise InvalidRequestError("late")

    def hand_back(self):
        pass

    def close(self):
        pass


@pytest.fixture
def serving():
    return Serving(FakeModel())


async def stream(serving, name, limit=None, **options):
    message = ModelInferRequest(id=name)
    if options.get("empty_final"):
        message.parameters[EMPTY_FINAL].bool_param = True
    async with aclosing(
        serving.stream(message, Caller(deadline=Deadline.after(options.get("timeout_s"))))
    ) as responses:
        async for _ in responses:
            if limit is not None and (limit := limit - 1) == 0:
                return


def counted(serving):
    """(success, fail) of the requests, and by index (success, empty, fail, cancel) of the responses."""
    report = serving.statistics()
    stats = report.inference_stats
    responses = {
        index: (tally.success.count, tally.empty_response.count, tally.fail.count, tally.cancel.count)
        for index, tally in report.response_stats.items()
    }
    return (stats.success.count, stats.fail.count), responses


async def test_all_parts_of_the_computation_have_one_count(serving):
    """Triton's perf_analyzer ends itself where they differ."""
    await stream(serving, "2")
    serving.model.statistics.succeeded += 1
    report = serving.statistics()
    for stats in (report.inference_stats, *report.response_stats.values()):
        assert stats.compute_infer.count == stats.compute_output.count == 1
    assert report.inference_stats.compute_input.count == report.inference_stats.queue.count == 1


async def test_responses_are_counted_by_their_index(serving):
    await stream(serving, "3")
    await stream(serving, "1")
    assert counted(serving) == ((2, 0), {"0": (2, 0, 0, 0), "1": (1, 0, 0, 0), "2": (1, 0, 0, 0)})
    report = serving.statistics()
    assert report.inference_count == 2
    assert report.last_inference > 0
    assert report.inference_stats.success.ns >= sum(tally.success.ns for tally in report.response_stats.values()) > 0


async def test_a_long_stream_makes_no_long_answer(serving):
    await stream(serving, "5000")
    report = serving.statistics().response_stats
    assert len(report) == 17
    assert report["16+"].success.count == 5000 - 16


async def test_the_empty_final_response_is_counted(serving):
    await stream(serving, "2", empty_final=True)
    assert counted(serving) == ((1, 0), {"0": (1, 0, 0, 0), "1": (1, 0, 0, 0), "2": (0, 1, 0, 0)})


async def test_refused_requests_and_later_failures_count_as_failures(serving):
    with pytest.raises(InvalidRequestError):
        await serving.infer(ModelInferRequest(id="bad"))
    with pytest.raises(InvalidRequestError):
        await stream(serving, "fails")
    assert counted(serving) == ((0, 2), {"0": (1, 0, 1, 0), "1": (0, 0, 1, 0)})
    assert serving.statistics().inference_stats.fail.ns > 0


async def test_a_cancel_does_not_count_as_a_failure_but_a_deadline_does(serving):
    await stream(serving, "3", limit=1)
    assert counted(serving) == ((0, 0), {"0": (1, 0, 0, 0), "1": (0, 0, 0, 1)})
    for timeout_s in (None, 0.0):
        waiting = asyncio.create_task(stream(serving, "waits", timeout_s=timeout_s))
        await until(lambda: serving.model.request_ids[-1] == "waits")
        waiting.cancel()
        await asyncio.wait([waiting])
        serving.model.request_ids.append("")
    assert counted(serving) == ((0, 1), {"0": (3, 0, 0, 0), "1": (0, 0, 1, 2)})


async def test_a_cancel_after_the_last_response_counts_as_a_success(serving):
    await stream(serving, "3", limit=3)
    assert counted(serving)[0] == (1, 0)


async def test_a_batch_counts_as_one_inference_per_row():
    serving = Serving(FakeModel(max_batch_size=8))
    message = ModelInferRequest(id="1")
    add_input(message, Tensor("input_ids", "INT64", np.ones((5, 3), dtype=np.int64)))
    await serving.infer(message)
    one = ModelInferRequest(id="1")
    add_input(one, Tensor("input_ids", "INT64", np.ones(3, dtype=np.int64)))
    await serving.infer(one)
    assert serving.statistics().inference_count == 6
    assert counted(serving)[0] == (2, 0)
