"""A generation's responses: the fingerprint of its weights, its cached tokens, and ends that were lost on the way."""

from contextlib import aclosing

import numpy as np
import pytest
import torch

from headrace.clients import Client, Policy
from headrace.errors import InvalidRequestError
from headrace.oip.parameters import set_parameters
from headrace.oip.prompt_scores import OUTPUTS as PROMPT_OUTPUTS
from headrace.oip.stream_infer import FINAL
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace.sampling import SamplingParameters
from headrace_predictor.generation.loaded_model import LoadedModel
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.generation.requests import read_request
from headrace_predictor.models.served_model import Caller
from headrace_predictor.repository.lease import Serving
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.model.fakes import END, FakeRunner, Gate, engines, logits_after
from tests.support.in_process_engine import InProcessEngine


@pytest.fixture
def model_of():
    with engines() as make:

        def model(runner, fingerprint="", **limits):
            engine = InProcessEngine(make(runner, **limits))
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


async def read(model, gate=None, **parameters):
    """Every response of a stream; with a gate each token waits until the one before has been read."""
    gate = gate or Gate()
    found = []
    async with aclosing(model.stream(message(**parameters))) as responses:
        gate.open()
        async for response in responses:
            found.append(response)
            gate.open()
    return found


def ids_of(response):
    return decode_outputs(response)["output_ids"].array.tolist()


async def test_the_first_response_names_the_weights(model_of):
    gate = Gate()
    serving = Serving(model_of(FakeRunner(gate), fingerprint="a"))
    assert serving.model.description.parameters["fingerprint"] == "a"
    first, *others = await read(serving, gate)
    assert first.parameters["fingerprint"].string_param == "a"
    assert others
    assert not any("fingerprint" in response.parameters for response in others)
    gate.open(1000)
    assert (await serving.infer(message())).parameters["fingerprint"].string_param == "a"


@pytest.mark.parametrize(
    ("salt", "client", "is_reported"),
    [(None, "", False), ("", "", False), ("mine", "", True), (None, "alice", True)],
    ids=["a stranger", "an empty salt", "the owner of a cache", "a client with a key"],
)
async def test_cached_tokens_are_reported_to_their_owner_only(model_of, salt, client, is_reported):
    gate = Gate()
    gate.open(1000)
    model = model_of(FakeRunner(gate))

    def prompt_request():
        request = message(**({} if salt is None else {"cache_salt": salt}))
        del request.inputs[:], request.raw_input_contents[:]
        add_input(request, Tensor("input_ids", "INT64", np.arange(40)))
        return request

    for is_repeat in (False, True):
        whole = await model.infer(prompt_request(), Caller(Client(client, Policy())))
        assert bool(whole.parameters["cached_tokens"].int64_param) == (is_repeat and is_reported)


@pytest.mark.parametrize("output_ids", [[], [7]])
def test_only_the_transformer_may_resume_an_answer(model_of, output_ids):
    loaded = model_of(FakeRunner()).loaded
    assert not read_request(loaded, message(output_ids)).moved


def test_the_first_tokens_deadline_is_that_of_the_request(model_of):
    loaded = model_of(FakeRunner()).loaded
    assert read_request(loaded, message(), Caller(first_token_timeout_s=0.5)).first_token_timeout_s == 0.5


class Ending(FakeRunner):
    """Ends a sequence after two tokens."""

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
    (response,) = await read(model, output_ids=tuple(output_ids), **parameters)
    assert ids_of(response) == []
    values = response.parameters
    assert values["finish_reason"].string_param == reason
    assert values[FINAL].bool_param
    usage = {name: values[name].int64_param for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": len(output_ids)}
    assert runner.steps == []


@pytest.mark.parametrize(
    ("output_ids", "parameters"),
    [((10, END), {"ignore_eos": True}), ((10, END), {"min_tokens": 5}), ((10, 40), {"stop_token_ids": [41]})],
)
async def test_an_incomplete_continuation_generates_the_rest(model_of, output_ids, parameters):
    responses = await read(model_of(FakeRunner()), output_ids=output_ids, **parameters)
    assert sum(len(ids_of(response)) for response in responses) == 10


async def test_a_whole_answer_is_one_response_even_if_only_its_end_was_lost(model_of):
    response = await model_of(FakeRunner()).infer(message(output_ids=tuple(range(10, 22))))
    assert ids_of(response) == []
    assert response.parameters["finish_reason"].string_param == "length"
    whole = await model_of(Ending()).infer(message(temperature=0))
    assert ids_of(whole)[-1] == END


class Scoring(FakeRunner):
    """Scores prompts, each position by its own id."""

    scores_prompts = True

    def run(self, rows):
        scored = [self.logits(row.sequence.ids[: place + 1]) for row in rows for place in row.scores]
        return torch.cat([super().run(rows), *(logits[None] for logits in scored)])


async def test_a_prompts_log_probabilities_are_in_the_first_response(model_of):
    gate = Gate()
    model = model_of(Scoring(gate))
    first, *others = map(decode_outputs, await read(model, gate, prompt_logprobs=0))
    assert first["prompt_top_logprobs"].array.shape == (1, 0)
    assert others
    assert not any(set(PROMPT_OUTPUTS) & set(outputs) for outputs in others)
    gate.open(1000)
    assert [output.name for output in model.description.outputs][4:] == list(PROMPT_OUTPUTS)
    whole = decode_outputs(await model.infer(message(prompt_logprobs=2)))
    logprobs = logits_after([5]).log_softmax(-1)
    assert whole["prompt_logprobs"].array.tolist() == pytest.approx([float(logprobs[6])])
    assert whole["prompt_top_logprobs"].array.tolist() == [pytest.approx(logprobs.topk(2).values.tolist())]
    assert whole["prompt_top_logprob_ids"].array.shape == (1, 2)
    assert not set(PROMPT_OUTPUTS) & set(decode_outputs(await model.infer(message())))


@pytest.mark.parametrize("count", [-1, 21, 1.5, True, "all"])
async def test_the_number_of_top_log_probabilities_is_checked(model_of, count):
    with pytest.raises(InvalidRequestError, match="prompt_logprobs must be from 0 to 20"):
        await model_of(Scoring()).infer(message(prompt_logprobs=count))


async def test_outputs_of_a_prompt_need_the_parameter(model_of):
    request = message()
    request.outputs.add(name="prompt_logprobs")
    with pytest.raises(InvalidRequestError, match="need the parameter prompt_logprobs"):
        await model_of(Scoring()).infer(request)


async def test_a_model_that_cannot_score_prompts_refuses_it(model_of):
    model = model_of(FakeRunner())
    assert len(model.description.outputs) == 4
    with pytest.raises(InvalidRequestError, match="has no log probabilities of prompts"):
        await model.infer(message(prompt_logprobs=1))
