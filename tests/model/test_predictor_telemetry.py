"""A predictor's telemetry of generations: events of the call's span, time in the queue, and metrics by model."""

import asyncio
import time
from contextlib import aclosing

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.deadline import Deadline
from headrace.errors import OverloadedError
from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import Tensor, add_input
from headrace.sampling import SamplingParameters
from headrace.telemetry.identity import MODEL
from headrace_predictor.generation.loaded_model import LoadedModel
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.generation.served_engines import ServedEngines, observe_engines
from headrace_predictor.models.served_model import Caller
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.settings import PredictorSettings
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.model.fakes import FakeRunner, Gate, engines
from tests.random_models import save_random_model
from tests.support.in_process_engine import InProcessEngine
from tests.support.measured import Measured
from tests.waiting import until


@pytest.fixture
def metrics():
    return Measured()


class Spans:
    """A tracer and its ended spans."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def call(self):
        """Makes the span of a call the current one within the block."""
        tracer = self.provider.get_tracer("test")
        return tracer.start_as_current_span("call", record_exception=False, set_status_on_exception=False)

    @property
    def events(self):
        """The events of the only span."""
        (span,) = self._exporter.get_finished_spans()
        assert span.attributes["gen_ai.request.model"] == "fake"
        return span.events

    @property
    def names(self):
        return [event.name for event in self.events]


@pytest.fixture
def spans():
    made = Spans()
    yield made
    made.provider.shutdown()


@pytest.fixture
def model_of(metrics):
    with engines() as make:

        def model(runner, name="fake", **limits):
            engine = InProcessEngine(make(runner, **limits))
            loaded = LoadedModel(name, "Fake", "cpu", "fp32", SamplingParameters(), engine)
            return GenerationModel(loaded, metrics.meter)

        yield model


def message(prompt=(5, 6), name="fake", **parameters):
    request = ModelInferRequest(model_name=name, id="r")
    add_input(request, Tensor("input_ids", "INT64", np.array(prompt)))
    set_parameters(request.parameters, {"max_tokens": 12, "seed": 3, **parameters})
    return request


async def read(model, timeout_s=None, **parameters):
    """Every response of a stream."""
    async with aclosing(model.stream(message(**parameters), Caller(deadline=Deadline.after(timeout_s)))) as responses:
        return [response async for response in responses]


async def test_the_events_of_a_generation_are_at_the_engines_own_times(model_of, spans):
    gate = Gate()
    model = model_of(FakeRunner(gate))
    begun = time.time_ns()
    with spans.call():
        reader = asyncio.create_task(read(model))
        await until(lambda: model.engine.load.batch)
        waited = time.time_ns()
        gate.open(100)
        await reader
    assert spans.names == ["queued", "prefill", "first_token", "generation_end"]
    queued, prefill, first_token, end = (event.timestamp for event in spans.events)
    # The events do not all have the time at which the span was written.
    assert begun - 1_000_000 <= queued <= prefill <= waited + 1_000_000
    assert waited - 1_000_000 <= first_token <= end <= time.time_ns()
    assert dict(spans.events[-1].attributes) == {"gen_ai.usage.output_tokens": 12}


async def test_a_cancel_in_the_queue_has_its_own_event(model_of, spans, metrics):
    gate = Gate()
    model = model_of(FakeRunner(gate), max_running=1)
    running = asyncio.create_task(read(model))
    await until(lambda: model.engine.load.running)
    with spans.call():
        waiting = asyncio.create_task(read(model))
        await until(lambda: model.engine.load.waiting)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert spans.names == ["queued", "generation_end"]
    assert spans.events[-1].attributes["gen_ai.usage.output_tokens"] == 0
    gate.open(100)
    await running
    # A request that never began has no time in the queue.
    assert metrics.points_by(MODEL, "headrace.queue.duration")["fake"].count == 1


async def test_each_preemption_is_an_event(model_of, spans):
    gate = Gate()
    model = model_of(FakeRunner(gate, blocks=1 + 20), max_running=4, max_waiting=32)
    others = [asyncio.create_task(read(model, prompt=[number] * 17, max_tokens=30)) for number in range(40, 43)]
    await until(lambda: model.engine.load.running + model.engine.load.waiting == 3)
    with spans.call():
        newest = asyncio.create_task(read(model, prompt=[43] * 17, max_tokens=30))
        await until(lambda: model.engine.load.running + model.engine.load.waiting == 4)
        gate.open(10_000)
        await newest
    await asyncio.gather(*others)
    assert model.engine.statistics.preempted > 0
    preempted = spans.names.count("preempted")
    assert spans.events[-1].attributes.get("headrace.preemptions", 0) == preempted > 0
    assert (spans.names[:2], spans.names[-1]) == (["queued", "prefill"], "generation_end")
    assert [event.timestamp for event in spans.events] == sorted(event.timestamp for event in spans.events)


async def test_a_request_that_is_refused_at_once_has_no_events(model_of, spans):
    gate = Gate()
    model = model_of(FakeRunner(gate), max_running=1, max_waiting=0)
    running = asyncio.create_task(read(model))
    await until(lambda: model.engine.load.running)
    with spans.call() as span, pytest.raises(OverloadedError):
        await read(model)
    assert span.events == ()
    gate.open(100)
    await running


async def test_the_load_is_reported_by_model(model_of, metrics):
    served = ServedEngines()
    observe_engines(served, metrics.meter)
    gate = Gate()
    busy, idle = model_of(FakeRunner(gate), "busy", max_running=2), model_of(FakeRunner(), "idle")
    served.add(busy)
    served.add(idle)
    readers = [asyncio.create_task(read(busy)) for _ in range(3)]
    await until(lambda: busy.engine.load.running + busy.engine.load.waiting == 3 and busy.engine.load.batch)
    if busy.engine.load.batch == 1:  # The first step began before the second request came.
        gate.open(1)
    await until(lambda: busy.engine.load.batch == 2)
    assert metrics.values_by(MODEL, "headrace.sequences.running") == {"busy": 2, "idle": 0}
    assert metrics.values_by(MODEL, "headrace.sequences.waiting") == {"busy": 1, "idle": 0}
    assert metrics.values_by(MODEL, "headrace.batch.size") == {"busy": 2, "idle": 0}
    assert 0 < metrics.values_by(MODEL, "headrace.kv_cache.utilization")["busy"] < 1
    age = metrics.values_by(MODEL, "headrace.sequences.oldest_age")
    assert age["busy"] > age["idle"] == 0
    gate.open(100)
    await asyncio.gather(*readers)
    assert metrics.values_by(MODEL, "headrace.tokens") == {"busy": 36, "idle": 0}
    for name in ("sequences.preempted", "tokens_after_cancel", "lookup.proposed", "lookup.accepted"):
        assert metrics.values_by(MODEL, f"headrace.{name}") == {"busy": 0, "idle": 0}


async def test_the_hit_ratio_is_of_all_prompts_since_the_start(model_of, metrics):
    served = ServedEngines()
    observe_engines(served, metrics.meter)
    model = model_of(FakeRunner())
    served.add(model)
    assert metrics.values_by(MODEL, "headrace.prefix_cache.hit_ratio") == {"fake": 0}
    for _ in range(2):
        await read(model, prompt=range(5, 23))
    assert metrics.values_by(MODEL, "headrace.prefix_cache.hit_ratio") == {"fake": 16 / 36}


async def test_totals_continue_at_the_engine_that_replaces_another(model_of, metrics):
    served = ServedEngines()
    observe_engines(served, metrics.meter)
    old, new = model_of(FakeRunner()), model_of(FakeRunner())
    for model in (old, new):
        await model.warm_up()  # The self-test's own generation does not count.
        served.add(model)
        await read(model)
    served.remove(old)
    assert metrics.values_by(MODEL, "headrace.tokens") == {"fake": 24}
    assert metrics.values_by(MODEL, "headrace.sequences.running") == {"fake": 0}


async def test_models_come_and_go_with_the_repository_that_serves_them(tmp_path, metrics, engine_host):
    save_random_model("llama", tmp_path / "llama")

    async def report_ready(_):
        pass

    settings = {
        "device": "cpu",
        "threads": 1,
        "drain_s": 5.0,
        "kv_cache_memory": "1MiB",
        "MODELS": f"llama={tmp_path}/llama",
    }
    repository = ModelRepository(PredictorSettings(model_repository=tmp_path, **settings), report_ready, engine_host)
    observe_engines(repository.engines, metrics.meter)
    try:
        assert metrics.values_by(MODEL, "headrace.tokens") == {}
        await repository.load_all()
        for tokens in (4, 8):
            await repository.load("llama")
            await repository.get("llama").infer(message(name="llama", max_tokens=4, ignore_eos=True))
            assert metrics.values_by(MODEL, "headrace.tokens") == {"llama": tokens}
            assert metrics.values_by(MODEL, "headrace.sequences.running") == {"llama": 0}
            await repository.unload("llama")
            assert metrics.values_by(MODEL, "headrace.tokens") == {"llama": tokens}
            assert metrics.values_by(MODEL, "headrace.sequences.running") == {}
    finally:
        await repository.close()
