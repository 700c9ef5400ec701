"""One call carries the tokens of many sequences, one message per step: tokens, errors and ends equal those of single
calls.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.frames import FrameConnection
from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace.rpc.limits.admission import Admission
from headrace.rpc.server.call_telemetry import ServerTelemetry
from headrace.rpc.server.handlers import Interceptor
from headrace_predictor.repository.repository import ModelRepository
from headrace_predictor.servicer import InferenceServicer
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.steps import sequence as steps_sequence
from headrace_predictor.steps import session
from headrace_predictor.steps.server import StepsServer
from headrace_protos import inference_pb2, inference_pb2_grpc
from tests.random_models import save_random_model
from tests.support.listening import listening
from tests.support.steps_caller import SAMPLING, calling
from tests.waiting import until

# Longer than any test, on every machine; others may run in its place.
ENDLESS = {**SAMPLING, "max_tokens": 200, "pace": 5}


class Predictor:
    """A repository with one model behind a real port."""

    def __init__(self, repository, target, steps_port, stopping, admission):
        self.repository = repository
        self.target = target
        self.steps_port = steps_port
        self.stopping = stopping
        self.admission = admission

    @property
    def engine(self):
        return self.repository.get("llama").model.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_random_model("llama", folder)
    return folder


@pytest.fixture
def predictor_of(engine_host, folder):
    @asynccontextmanager
    async def start(**given):
        given = {"device": "cpu", "threads": 1, "kv_cache_memory": "1MiB", "MODELS": f"llama={folder}", **given}

        async def ignore(_):
            pass

        repository, stopping, admission = (
            ModelRepository(PredictorSettings(**given), ignore, engine_host),
            asyncio.Event(),
            Admission(),
        )
        interceptors = (Interceptor("predictor", admission, ServerTelemetry()),)
        server = grpc.aio.server(interceptors=interceptors)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(repository), server)
        steps = StepsServer(repository, stopping)
        steps_port = await steps.start("127.0.0.1", 0)
        await repository.load_all()
        try:
            async with listening(server) as address:
                yield Predictor(repository, address, steps_port, stopping, admission)
        finally:
            await steps.stop(0)
            await repository.close()

    return start


@pytest.fixture
async def predictor(predictor_of):
    async with predictor_of() as started:
        yield started


@pytest.fixture
async def caller(predictor):
    async with calling(predictor.steps_port) as started:
        yield started


async def by_inference(predictor, prompt, output_ids=(), **parameters):
    message = inference_pb2.ModelInferRequest(model_name="llama", id="r")
    add_input(message, Tensor("input_ids", "INT64", np.array(prompt)))
    if output_ids:
        add_input(message, Tensor("output_ids", "INT64", np.array(output_ids)))
    set_parameters(message.parameters, {**SAMPLING, **parameters})

    async def once():
        yield message

    async with grpc.aio.insecure_channel(predictor.target) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = [each.infer_response async for each in stub.ModelStreamInfer(once())]
    ids, logprobs = [], []
    for response in responses:
        outputs = decode_outputs(response)
        ids += outputs["output_ids"].array.tolist()
        if "logprobs" in outputs:
            logprobs += outputs["logprobs"].array.tolist()
    return ids, logprobs, responses[-1].parameters["finish_reason"].string_param


async def test_the_tokens_equal_those_of_a_single_call(predictor, caller):
    prompts = {number: [3 + number, 4, 5 + 2 * number] for number in range(1, 9)}
    for number, prompt in prompts.items():
        caller.submit(number, prompt)
    for number, prompt in prompts.items():
        end = await caller.end_of(number)
        ids, _, reason = await by_inference(predictor, prompt)
        assert caller.tokens[number] == ids
        assert end.finish_reason == reason
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 12)
        assert caller.begun[number].number == number
        assert caller.accepted[number].fingerprint == predictor.repository.get("llama").fingerprint
        assert not caller.accepted[number].span
    # The sequences share steps.
    assert len(caller.messages) < 8 * 12


async def test_log_probabilities_earlier_output_and_scores_of_the_prompt(predictor, caller):
    caller.submit(1, sampling={**SAMPLING, "logprobs": True, "top_logprobs": 2}, prompt_logprobs=2)
    caller.submit(2, output_ids=[9, 8])
    await caller.end_of(1)
    await caller.end_of(2)
    ids, logprobs, _ = await by_inference(predictor, [5, 6, 7], logprobs=True)
    assert caller.tokens[1] == ids
    assert [each.chosen for each in caller.logprobs[1]] == pytest.approx(logprobs)
    assert all(len(each.top_ids) == len(each.top) == 2 for each in caller.logprobs[1])
    scores = caller.begun[1].prompt
    assert (len(scores.chosen), len(scores.top_ids)) == (2, 4)
    assert caller.tokens[2] == (await by_inference(predictor, [5, 6, 7], [9, 8]))[0]


REFUSED = [
    ({"model": "other"}, "NotFoundError", "no model 'other'"),
    ({"prompt": []}, "InvalidRequestError", "the prompt is empty"),
    ({"prompt": [10**6]}, "InvalidRequestError", "token id 1000000 is outside"),
    ({"sampling": {"temperature": 9}}, "InvalidRequestError", "temperature"),
    ({"sampling": [1]}, "InvalidRequestError", "sampling must be a JSON object"),
    ({"output_ids": [1] * 13}, "InvalidRequestError", "output_ids has 13 tokens, max_tokens is 12"),
    ({"weight": 0.0}, "InvalidRequestError", "weight must be positive, not 0"),
    ({"fingerprint": "another"}, "OtherWeightsError", "has other weights here"),
    ({"timeout_s": 0.0}, "DeadlineError", ""),
]


async def test_a_refused_sequence_ends_alone(predictor, caller):
    for number, (fields, error, text) in enumerate(REFUSED):
        caller.submit(2 * number, **fields)
        caller.submit(2 * number + 1)
        refused = await caller.error_of(2 * number)
        assert (refused.class_name, refused.hop) == (error, "predictor")
        assert text in refused.message
        assert (await caller.end_of(2 * number + 1)).finish_reason == "length"


async def test_a_sequence_that_fails_before_the_engine_has_it_is_in_flight_no_more(predictor, caller, monkeypatch):
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(session, "complete", fail)
    caller.submit(1)
    assert (await caller.error_of(1)).class_name == "RequestFailedError"
    assert predictor.repository.get("llama").request_ids == []


async def test_a_cancel_frees_the_blocks_and_its_neighbour_continues(predictor, caller):
    caller.submit(1, sampling=ENDLESS)
    caller.submit(2, sampling={**SAMPLING, "max_tokens": 60})
    await until(lambda: 1 in caller.begun and 2 in caller.begun)
    caller.cancel(1)
    await until(lambda: predictor.engine.statistics.cancelled == 1)
    assert len(caller.tokens[1]) < 200
    await caller.end_of(2)
    assert len(caller.tokens[2]) == 60
    await until(lambda: not predictor.engine.load.blocks_in_use)


async def test_a_broken_connection_cancels_its_sequences(predictor, caller):
    caller.submit(1, sampling=ENDLESS)
    await until(lambda: 1 in caller.begun)
    caller.connection.abort()
    await until(lambda: predictor.engine.statistics.cancelled == 1)
    await until(lambda: not predictor.repository.get("llama")._in_flight)
    assert len(predictor.engine._sinks) == 1


async def test_the_death_of_an_engine_ends_its_sequences_and_the_call_continues(predictor_of, slow_models):
    async with predictor_of(max_running=1) as predictor, calling(predictor.steps_port) as caller:
        caller.submit(1, sampling={**SAMPLING, "max_tokens": 200})
        await until(lambda: 1 in caller.begun)
        caller.submit(2)
        await until(lambda: predictor.engine.load.waiting)
        os.kill(predictor.engine.pid, signal.SIGKILL)
        errors = [await caller.error_of(number) for number in (1, 2)]
        assert [(error.class_name, error.message) for error in errors] == [
            ("HopBrokenError", "the engine died"),
            ("NotReadyError", "the engine stopped"),
        ]
        # The model is absent from the loads until another engine serves it.
        await until(lambda: caller.messages[-1].HasField("loads") and not caller.messages[-1].loads.models)
        await until(lambda: caller.messages[-1].loads.models)
        caller.submit(3)
        assert (await caller.end_of(3)).finish_reason == "length"


async def test_loads_are_sent_at_once_and_after_every_second_of_silence(predictor, caller):
    await until(lambda: caller.messages)
    since = time.monotonic()
    (load,) = caller.messages[0].loads.models
    assert (load.model, load.running, load.waiting, load.cache_free) == ("llama", 0, 0, 1)
    assert load.fingerprint == predictor.repository.get("llama").fingerprint
    await until(lambda: len(caller.messages) > 1)
    assert time.monotonic() - since > 0.5
    assert caller.messages[1].HasField("loads")
    assert not caller.messages[1].numbers


async def test_a_transformer_that_sends_nothing_is_taken_for_dead(predictor_of, monkeypatch):
    monkeypatch.setattr(session, "_SILENCE_S", 0.5)
    async with predictor_of() as predictor, calling(predictor.steps_port) as caller:
        caller.submit(1, sampling=ENDLESS)
        await until(lambda: 1 in caller.begun)
        await caller.closed()
        await until(lambda: predictor.engine.statistics.cancelled == 1)


async def test_an_unloaded_model_ends_its_sequences_and_leaves_the_loads(predictor_of):
    async with predictor_of(drain_s=0.05) as predictor, calling(predictor.steps_port) as caller:
        caller.submit(1, sampling=ENDLESS)
        await until(lambda: 1 in caller.begun)
        os.kill(pid := predictor.engine.pid, signal.SIGSTOP)
        unloading = asyncio.create_task(predictor.repository.unload("llama"))
        assert (await caller.error_of(1)).class_name == "DrainingError"
        os.kill(pid, signal.SIGCONT)
        await unloading
        await until(lambda: caller.messages[-1].HasField("loads") and not caller.messages[-1].loads.models)
        caller.submit(2)
        assert (await caller.error_of(2)).class_name == "NotFoundError"


@pytest.mark.parametrize("drain", ["hand-back", "finish"])
async def test_a_drain_offers_then_hands_back_then_ends_the_call(predictor_of, drain):
    async with predictor_of(drain=drain) as predictor, calling(predictor.steps_port) as caller:
        caller.submit(1, sampling=ENDLESS)
        await until(lambda: 1 in caller.begun)
        os.kill(pid := predictor.engine.pid, signal.SIGSTOP)
        draining = asyncio.create_task(predictor.repository.drain(1))
        await until(lambda: predictor.repository.is_draining)
        caller.submit(2)
        assert (await caller.error_of(2)).class_name == "DrainingError"
        assert caller.leaving == (drain == "hand-back")
        assert (await caller.error_of(1)).class_name == "DrainingError"
        await draining
        os.kill(pid, signal.SIGCONT)
        await caller.closed()


async def test_a_process_that_hands_over_its_port_ends_the_call_after_its_last_sequence(predictor, caller):
    caller.submit(1, sampling={**SAMPLING, "max_tokens": 30, "pace": 30})
    await until(lambda: 1 in caller.begun)
    predictor.stopping.set()
    caller.submit(2)
    assert (await caller.error_of(2)).class_name == "DrainingError"
    await caller.end_of(1)
    assert len(caller.tokens[1]) == 30
    await caller.closed()


async def test_steps_merge_while_the_caller_does_not_read(predictor, caller, monkeypatch):
    await until(lambda: caller.messages)
    sampling = {**SAMPLING, "max_tokens": 120, "logprobs": True, "top_logprobs": 20}
    # The system's buffers would take all of the steps.
    monkeypatch.setattr(FrameConnection, "can_send", property(lambda connection: connection is caller.connection))
    for number in range(1, 9):
        caller.submit(number, [3, 4 + number], sampling)
    await until(lambda: predictor.engine.statistics.succeeded >= 8 and not predictor.engine.load.running)
    assert not caller.tokens
    monkeypatch.undo()
    for number in range(1, 9):
        await caller.end_of(number)
        assert len(caller.tokens[number]) == len(caller.logprobs[number]) == 120
    assert max(len(message.numbers) for message in caller.messages) > 8


async def test_the_first_token_has_the_number_of_cached_prompt_tokens(caller):
    for number in (1, 2):
        caller.submit(number, range(3, 43))
        assert (await caller.end_of(number)).finish_reason == "length"
    assert not caller.begun[1].cached_tokens
    assert caller.begun[2].cached_tokens == caller.ended[2].usage.cached_tokens > 0


async def test_a_handed_back_sequence_keeps_its_tokens_and_a_single_call_continues_it(predictor_of):
    async with predictor_of(max_running=2) as predictor, calling(predictor.steps_port) as caller:
        own = asyncio.create_task(by_inference(predictor, [5, 6, 7], max_tokens=40, pace=40))
        await until(lambda: predictor.engine.load.running)
        for number in (1, 2):
            caller.submit(number, sampling=ENDLESS)
        await until(lambda: 1 in caller.begun and 2 in caller.accepted)
        assert not own.done()
        predictor.repository.get("llama").model.hand_back()
        for number in (1, 2):  # The second one waits.
            assert (await caller.error_of(number)).class_name == "DrainingError"
        ids, _, reason = await own
        assert (len(ids), reason) == (40, "length")
        assert caller.tokens[1] == ids[: len(caller.tokens[1])]
        caller.submit(3)
        assert (await caller.end_of(3)).finish_reason == "length"


async def test_an_isolated_sequence_is_announced_before_it_runs(predictor, caller):
    caller.submit(1, alone=True)
    assert (await caller.end_of(1)).finish_reason == "length"
    assert caller.alone == [1]
    (announcement,) = (i for i, message in enumerate(caller.messages) if message.alone)
    assert not any(1 in message.numbers for message in caller.messages[: announcement + 1])


async def test_a_repeated_number_of_a_sequence_in_flight_ends_the_connection(predictor, caller, caplog):
    caller.submit(1, sampling=ENDLESS)
    await until(lambda: 1 in caller.begun)
    caller.submit(1)
    await caller.closed()
    assert "sequence 1 is in flight already" in caplog.text


async def test_sequences_count_as_requests_of_their_model(predictor, caller):
    caller.submit(1)
    caller.submit(2, sampling={"temperature": 9})
    await caller.end_of(1)
    await caller.end_of(2)
    caller.submit(3, sampling=ENDLESS)
    await until(lambda: 3 in caller.begun)
    serving = predictor.repository.get("llama")
    assert serving.request_ids == ["r3"]
    caller.cancel(3)
    await until(lambda: not serving.request_ids)
    statistics = serving.statistics()
    assert (statistics.inference_stats.success.count, statistics.inference_stats.fail.count) == (1, 1)
    assert statistics.response_stats["0"].cancel.count == 1


async def test_each_sequence_has_a_span_with_the_phases_of_its_engine(predictor, monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(steps_sequence.trace, "get_tracer", lambda _: provider.get_tracer("test"))
    parent = f"00-{7:032x}-{8:016x}-01"
    async with calling(predictor.steps_port) as caller:
        caller.submit(1, traceparent=parent, follows=f"00-{7:032x}-{9:016x}-01")
        await caller.end_of(1)
        for number, end in ((2, lambda: caller.cancel(2)), (3, predictor.repository.get("llama").model.hand_back)):
            caller.submit(number, traceparent=parent, sampling=ENDLESS)
            await until(lambda number=number: number in caller.begun)
            end()
            await until(lambda number=number: len(exporter.get_finished_spans()) == number)
    span, cancelled, handed_back = exporter.get_finished_spans()
    assert (span.name, span.parent.span_id, span.links[0].context.span_id) == ("headrace.v1.PredictorSteps/Run", 8, 9)
    assert [event.name for event in span.events] == ["queued", "prefill", "first_token", "generation_end", "end"]
    assert span.events[3].attributes["gen_ai.usage.output_tokens"] == 12
    assert caller.accepted[1].span.split("-")[2] == trace.format_span_id(span.context.span_id)
    assert cancelled.attributes["rpc.response.status_code"] == "CANCELLED"
    assert handed_back.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    for ended in (cancelled, handed_back):
        assert ended.events[3].name == "generation_end"
        assert "gen_ai.usage.output_tokens" not in ended.events[3].attributes, "only the engine knows how many"
    provider.shutdown()


async def test_a_direct_call_of_a_predictor_has_the_clients_name(predictor, caller):
    prompt = list(range(3, 75))
    message = inference_pb2.ModelInferRequest(model_name="llama", id="r")
    add_input(message, Tensor("input_ids", "INT64", np.array(prompt)))
    set_parameters(message.parameters, SAMPLING)
    async with grpc.aio.insecure_channel(predictor.target) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(message, metadata=(("x-headrace-client", "a"),))
    for number, (client, held) in enumerate([("", 0), ("b", 0), ("a", 64)], start=1):
        caller.submit(number, prompt, client=client)
        assert (await caller.end_of(number)).usage.cached_tokens == held
