"""A generation's stream as its caller asked for it: heartbeats, hand-back, and ends that were lost on the way."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
import torch

from millrace.deadline import NO_DEADLINE
from millrace.errors import DrainingError, InvalidRequestError, OtherWeightsError
from millrace.oip.parameters import set_parameters
from millrace.oip.prompt_logprobs import OUTPUTS as PROMPT_OUTPUTS
from millrace.oip.resumable import HEARTBEAT, RUNS_ALONE, CallOptions
from millrace.oip.stream_infer import FINAL
from millrace.oip.tensors import Tensor, add_input, decode_outputs
from millrace.sampling import SamplingParameters
from millrace_protos.inference_pb2 import ModelInferRequest
from services.predictor.generation.loaded_model import LoadedModel
from services.predictor.generation.model import GenerationModel
from services.predictor.generation.requests import read_request
from services.predictor.models.served_model import NO_OPTIONS
from services.predictor.repository.lease import Serving
from tests.model.fakes import END, FakeRunner, Gate, engines, expected, logits_after
from tests.waiting import until

BEATS = CallOptions(heartbeat_ms=5)
RESUMES = CallOptions(resumes=True)


@pytest.fixture
def model_of():
    with engines() as make:

        def model(runner, fingerprint="", **limits):
            engine = make(runner, **limits)
            return GenerationModel(
                LoadedModel("fake", "Fake", "cpu", "fp32", SamplingParameters(), engine, fingerprint)
            )

        yield model


def message(output_ids=(), **parameters):
    request = ModelInferRequest(model_name="fake", id="r")
    add_input(request, Tensor("input_ids", "INT64", np.array([5, 6])))
    if output_ids:
        add_input(request, Tensor("output_ids", "INT64", np.array(output_ids)))
    set_parameters(request.parameters, {"max_tokens": 12, "seed": 3, **parameters})
    return request


class Reader:
    """Reads a stream; how many heartbeats came, and the ids of each other response."""

    def __init__(self, model, options, **parameters):
        self.heartbeats = 0
        self.chunks = []
        self.responses = []
        self._task = asyncio.create_task(self._read(model, message(**parameters), options))

    async def _read(self, model, request, options):
        async with aclosing(model.stream(request, NO_DEADLINE, options)) as responses:
            async for response in responses:
                if HEARTBEAT in response.parameters:
                    assert (response.model_name, response.id, len(response.outputs)) == ("fake", "r", 0)
                    self.heartbeats += 1
                else:
                    self.responses.append(response)
                    self.chunks.append(ids_of(response))

    async def beats(self, count=3):
        """Waits for so many more heartbeats."""
        enough = self.heartbeats + count
        await until(lambda: self.heartbeats >= enough)

    async def end(self):
        await asyncio.wait_for(self._task, 30)
        return [token for chunk in self.chunks for token in chunk]


def ids_of(response):
    return decode_outputs(response)["output_ids"].array.tolist()


async def test_the_first_response_names_the_weights_and_a_stream_of_others_is_refused(model_of):
    gate = Gate()
    serving = Serving(model_of(FakeRunner(gate), fingerprint="a"))
    assert "a" in serving.model.description.parameters.values()

    async def read(options):
        async with aclosing(serving.stream(message(), NO_DEADLINE, options)) as responses:
            return [response.parameters["fingerprint"].string_param async for response in responses]

    with pytest.raises(OtherWeightsError):
        await read(CallOptions(resumes=True, fingerprint="b"))
    reading = asyncio.create_task(read(CallOptions(resumes=True, heartbeat_ms=5, fingerprint="a")))
    gate.open(1000)
    first, *others = await reading
    assert first == "a"
    assert not any(others)
    assert (await serving.infer(message(), NO_DEADLINE)).parameters["fingerprint"].string_param == "a"


@pytest.mark.parametrize(
    ("options", "salt", "is_told"),
    [(NO_OPTIONS, None, False), (NO_OPTIONS, "", False), (NO_OPTIONS, "mine", True), (RESUMES, None, True)],
    ids=["a stranger", "an empty salt", "the owner of a cache", "a transformer"],
)
async def test_what_was_cached_is_nobodys_but_its_owners_and_the_transformers(model_of, options, salt, is_told):
    gate = Gate()
    gate.open(1000)
    model = model_of(FakeRunner(gate))

    def asked():
        request = message(**({} if salt is None else {"cache_salt": salt}))
        del request.inputs[:], request.raw_input_contents[:]
        add_input(request, Tensor("input_ids", "INT64", np.arange(40)))
        return request

    for is_repeat in (False, True):
        whole = await model.infer(asked(), NO_DEADLINE, options)
        assert bool(whole.parameters["cached_tokens"].int64_param) == (is_repeat and is_told)


@pytest.mark.parametrize(
    ("options", "output_ids", "moved"),
    [(RESUMES, [7], True), (NO_OPTIONS, [7], False), (RESUMES, [], False)],
    ids=["a stream that was moved", "a stranger's ids", "one that begins"],
)
async def test_only_who_resumes_can_be_in_the_middle_of_an_answer(model_of, options, output_ids, moved):
    loaded = model_of(FakeRunner())._loaded
    assert read_request(loaded, message(output_ids), NO_DEADLINE, options).moved == moved


async def test_heartbeats_come_in_the_queue_in_the_prefill_and_between_tokens(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate), max_running=1)
    running, queued = Reader(model, BEATS), Reader(model, BEATS, max_tokens=1)
    await running.beats()
    await queued.beats()
    gate.open(1)
    await until(lambda: running.chunks)
    await running.beats()
    assert (running.chunks, queued.chunks) == ([expected((5, 6), 1)], [])
    gate.open(100)
    assert await running.end() == expected((5, 6))
    assert await queued.end() == expected((5, 6), 1)


async def test_one_that_runs_alone_says_so_before_its_first_step_and_only_then(model_of):
    said = []

    class Runner(FakeRunner):
        def run(self, rows):
            said.append([RUNS_ALONE in response.parameters for response in beats])
            return super().run(rows)

    beats, gate = [], Gate()
    gate.open(1)
    model = model_of(Runner(gate))
    options = CallOptions(resumes=True, heartbeat_ms=5, alone=True)
    async with aclosing(model.stream(message(), NO_DEADLINE, options)) as responses:
        async for response in responses:
            if HEARTBEAT not in response.parameters:
                break
            beats.append(response)
        assert any(said[0])
        beats[:] = [await anext(responses) for _ in range(3)]
        assert not any(RUNS_ALONE in response.parameters for response in beats)
        gate.open(100)


async def test_who_does_not_ask_gets_no_heartbeat(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate))
    asks, other = Reader(model, BEATS), Reader(model, NO_OPTIONS)
    await asks.beats()
    gate.open(100)
    assert await asks.end() == await other.end() == expected((5, 6))
    assert other.heartbeats == 0


async def test_heartbeats_come_while_tokens_are_held_back_and_change_no_chunk(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate))
    reader = Reader(model, BEATS, chunk_tokens=4)
    gate.open(3)
    await until(lambda: model.statistics.tokens == 3)
    await reader.beats()
    assert reader.chunks == []
    gate.open(1)
    await until(lambda: reader.chunks)
    assert [len(chunk) for chunk in reader.chunks] == [4]
    gate.open(100)
    assert await reader.end() == expected((5, 6))
    # The last one is what is left, however much that is.
    assert all(len(chunk) >= 4 for chunk in reader.chunks[:-1])


async def test_heartbeats_do_not_put_off_what_chunk_ms_lets_go(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate))
    reader = Reader(model, BEATS, chunk_tokens=100, chunk_ms=40)
    gate.open(2)
    # Nothing more is made: it is the time that ends the wait.
    await until(lambda: reader.chunks)
    assert reader.chunks[0] in (expected((5, 6), 1), expected((5, 6), 2))
    gate.open(100)
    assert await reader.end() == expected((5, 6))


async def test_a_handed_back_stream_has_what_was_made_and_the_others_go_on(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate), max_running=2)
    streams = [Reader(model, RESUMES), Reader(model, NO_OPTIONS), Reader(model, RESUMES)]
    gate.open(6)
    await until(lambda: model.statistics.tokens == 6 and model.resumable)
    model.hand_back()
    made = []
    for stream in (streams[0], streams[2]):
        with pytest.raises(DrainingError):
            await stream.end()
        made.append([token for chunk in stream.chunks for token in chunk])
    # The other waited for a place, and so has nothing yet.
    assert made == [expected((5, 6), len(made[0])), []]
    assert made[0]
    gate.open(100)
    assert await streams[1].end() == expected((5, 6))
    await until(lambda: model.engine.load.blocks_in_use == 0)
    # What comes later is its own affair.
    assert await Reader(model, RESUMES).end() == expected((5, 6))


async def test_tokens_that_are_held_back_are_handed_over_with_the_stream(model_of):
    gate = Gate()
    model = model_of(FakeRunner(gate))
    stream = Reader(model, CallOptions(resumes=True, heartbeat_ms=5), chunk_tokens=10)
    gate.open(3)
    await until(lambda: model.statistics.tokens == 3)
    model.hand_back()
    with pytest.raises(DrainingError):
        await stream.end()
    assert stream.chunks == [expected((5, 6), 3)]
    gate.open(100)


async def test_who_goes_on_elsewhere_is_told_of_cached_tokens_with_the_first_chunk(model_of):
    model = model_of(FakeRunner())
    request = {"max_tokens": 3}
    first, other = Reader(model, RESUMES, **request), Reader(model, NO_OPTIONS, **request)
    await first.end()
    await other.end()
    assert [response.parameters["cached_tokens"].int64_param for response in first.responses[:1]] == [0]
    # The last one tells it to everybody.
    assert all("cached_tokens" not in response.parameters for response in other.responses[:-1])


class Ending(FakeRunner):
    """Wants to end after two tokens."""

    def logits(self, ids):
        logits = super().logits(ids)
        if len(ids) >= 4:
            logits[END] = 1000.0
        return logits


@pytest.mark.parametrize(
    ("output_ids", "parameters", "reason"),
    [
        (range(10, 22), {}, "length"),
        ([10, END], {}, "stop"),
        ([10, END], {"min_tokens": 1}, "stop"),
        ([10, 40], {"stop_token_ids": [40]}, "stop"),
        ([10, 40], {"stop_token_ids": [40], "ignore_eos": True}, "stop"),
        ([*range(10, 21), END], {}, "stop"),
        ([*range(10, 21), END], {"ignore_eos": True}, "length"),
    ],
)
async def test_a_continuation_that_is_complete_gets_the_end_that_was_lost(model_of, output_ids, parameters, reason):
    runner = FakeRunner()
    model = model_of(runner)
    reader = Reader(model, RESUMES, output_ids=tuple(output_ids), **parameters)
    assert await reader.end() == []
    (response,) = reader.responses
    told = response.parameters
    assert told["finish_reason"].string_param == reason
    assert told[FINAL].bool_param
    usage = {name: told[name].int64_param for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": len(output_ids)}
    assert runner.steps == []


@pytest.mark.parametrize(
    ("output_ids", "parameters"),
    [((10, END), {"ignore_eos": True}), ((10, END), {"min_tokens": 5}), ((10, 40), {"stop_token_ids": [41]})],
)
async def test_one_that_is_not_goes_on(model_of, output_ids, parameters):
    reader = Reader(model_of(FakeRunner()), RESUMES, output_ids=output_ids, **parameters)
    assert len(await reader.end()) == 10


async def test_more_than_was_asked_for_is_refused(model_of):
    with pytest.raises(InvalidRequestError, match="output_ids has 13 tokens, max_tokens is 12"):
        await Reader(model_of(FakeRunner()), RESUMES, output_ids=tuple(range(10, 23))).end()


async def test_a_whole_answer_is_one_response_even_where_only_its_end_was_lost(model_of):
    response = await model_of(FakeRunner()).infer(message(output_ids=tuple(range(10, 22))), NO_DEADLINE)
    assert ids_of(response) == []
    assert response.parameters["finish_reason"].string_param == "length"
    whole = await model_of(Ending()).infer(message(temperature=0), NO_DEADLINE)
    assert ids_of(whole)[-1] == END


class Scoring(FakeRunner):
    """Scores prompts, by what a position's own id gives."""

    scores_prompts = True

    def run(self, rows):
        scored = [self.logits(row.sequence.ids[: place + 1]) for row in rows for place in row.scores]
        return torch.cat([super().run(rows), *(logits[None] for logits in scored)])


async def test_a_prompts_log_probabilities_come_with_the_first_tokens(model_of):
    model = model_of(Scoring())
    assert [output.name for output in model.description.outputs][4:] == list(PROMPT_OUTPUTS)
    whole = decode_outputs(await model.infer(message(prompt_logprobs=2), NO_DEADLINE))
    logprobs = logits_after([5]).log_softmax(-1)
    assert whole["prompt_logprobs"].array.tolist() == pytest.approx([float(logprobs[6])])
    assert whole["prompt_top_logprobs"].array.tolist() == [pytest.approx(logprobs.topk(2).values.tolist())]
    assert whole["prompt_top_logprob_ids"].array.shape == (1, 2)
    assert not set(PROMPT_OUTPUTS) & set(decode_outputs(await model.infer(message(), NO_DEADLINE)))
    reader = Reader(model, RESUMES, prompt_logprobs=0)
    await reader.end()
    first, *others = map(decode_outputs, reader.responses)
    assert first["prompt_top_logprobs"].array.shape == (1, 0)
    assert others
    assert not any(set(PROMPT_OUTPUTS) & set(outputs) for outputs in others)


@pytest.mark.parametrize("count", [-1, 21, 1.5, True, "all"])
async def test_how_many_of_the_likeliest_is_checked(model_of, count):
    with pytest.raises(InvalidRequestError, match="prompt_logprobs must be from 0 to 20"):
        await model_of(Scoring()).infer(message(prompt_logprobs=count), NO_DEADLINE)


async def test_outputs_of_a_prompt_need_the_parameter(model_of):
    request = message()
    request.outputs.add(name="prompt_logprobs")
    with pytest.raises(InvalidRequestError, match="need the parameter prompt_logprobs"):
        await model_of(Scoring()).infer(request, NO_DEADLINE)


async def test_a_model_that_scores_no_prompts_says_so(model_of):
    model = model_of(FakeRunner())
    assert len(model.description.outputs) == 4
    with pytest.raises(InvalidRequestError, match="gives no log probabilities of prompts"):
        await model.infer(message(prompt_logprobs=1), NO_DEADLINE)
