"""Models with recurrent states, many sequences at once, equal `generate` of each prompt alone."""

import copy
import random
from functools import cache, partial

import pytest
import torch

from headrace_predictor.engine.runners import memory
from headrace_predictor.engine.runners.hybrid import HybridRunner
from headrace_predictor.engine.runners.memory import cache_shape, plan_memory
from headrace_predictor.engine.runners.reach import find_reaches
from headrace_predictor.engine.runners.slots import Slots
from headrace_predictor.engine.runners.states import key_layers, state_bytes
from headrace_predictor.settings import PredictorSettings
from tests.model.step_loop import Loop, make_requests
from tests.random_models import greedy
from tests.zoo import FAMILIES, VOCABULARY

FEW_BLOCKS = 14  # The longest request takes four.
REQUESTS = make_requests(16, seed=3)
# With attention in other layers, in the same, and without; prompts as a whole, and rows one by one.
HOW = {"Qwen 3.5, text": {}, "Falcon-H1": {}, "Mamba": {"whole": True}, "RWKV": {"together": False}}
_FAMILIES = {family.name: family for family in FAMILIES}


@cache
def generated(name):
    """The family's model, which tests must not change, and the ids that `generate` gives for each request."""
    model = _FAMILIES[name].model()
    return model, [greedy(model, *request) for request in REQUESTS]


def loop_of(name, model=None, **limits):
    model = copy.deepcopy(generated(name)[0]) if model is None else model
    if key_layers(model.config):
        with torch.inference_mode():
            find_reaches(model, 256)
    return Loop(model, partial(HybridRunner, model, **HOW[name]), **limits)


@pytest.fixture(params=HOW)
def name(request):
    return request.param


def test_a_staggered_and_preempted_crowd_gets_the_answers_of_generate(name):
    expected = generated(name)[1]
    loop = loop_of(name, blocks=FEW_BLOCKS)
    assert loop.run_staggered(REQUESTS) == expected
    assert loop.scheduler.preempted > 0
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total


def test_rows_can_be_in_any_order_left_out_or_repeated(name):
    expected = generated(name)[1]
    loop = loop_of(name)
    assert loop.run_shuffled(REQUESTS[:8], repeated=0.2) == expected[:8]


def test_interrupted_steps_can_be_repeated(name):
    expected = generated(name)[1]
    loop = loop_of(name)
    passes = interrupted = 0
    is_armed = True

    def break_off(*_):
        nonlocal passes
        passes += 1
        if is_armed and passes % 3 == 0:
            raise RuntimeError("a passing fault")

    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    model = loop.runner._model
    layers = model.rwkv.blocks if name == "RWKV" else model.base_model.layers
    layers[1].register_forward_pre_hook(break_off)
    while loop.scheduler.sequences:
        rows, is_armed = loop.scheduler.schedule(64), True
        try:
            loop.run(rows)
        except RuntimeError:
            interrupted, is_armed = interrupted + 1, False
            for row in reversed(rows):
                loop.run([row])
    assert interrupted >= 5
    assert [sequence.output_ids for sequence in sequences] == expected[:6]


@pytest.mark.parametrize("step_tokens", [4, 64])
def test_it_continues_from_output_of_any_length(name, step_tokens):
    model = generated(name)[0]
    prompt = [5, 7, 11]
    expected = greedy(model, prompt, 16)
    loop = loop_of(name, max_running=4, step_tokens=step_tokens)
    sequences = [loop.add(prompt, 16, expected[:given]) for given in range(16)]
    loop.run_all()
    assert [sequence.output_ids for sequence in sequences] == [expected] * 16


def test_rows_that_decode_pass_the_model_together(name):
    loop = loop_of(name)
    for _ in range(8):
        loop.add([5, 7, 11], 8)
    passes = []
    loop.runner._model.register_forward_pre_hook(lambda *_: passes.append(None))
    while any(not sequence.output_ids for sequence in loop.scheduler.sequences):
        loop.step()
    passes.clear()
    loop.step()
    assert len(passes) == (8 if name == "RWKV" else 1)


@pytest.mark.parametrize("name", [name for name in HOW if name != "Mamba"])
def test_a_row_has_the_same_logits_in_every_crowd(name):
    """To the last bit, with packed products; Mamba 1 has one that cannot be packed."""
    rows, prompts = {}, [prompt for prompt, _ in REQUESTS[:6]]
    for crowd in ([0], [0, 1], [5, 0, 3, 2, 1, 4]):
        loop = loop_of(name, step_tokens=1000)
        with torch.inference_mode():
            loop.runner.pack()
            for index in crowd:
                loop.add(prompts[index], 8, [9] * 3)
            loop.run(loop.scheduler.schedule(1000))
            logits = loop.runner.run(loop.scheduler.schedule(1000))
        rows[len(crowd)] = logits[crowd.index(0)]
    assert torch.equal(rows[1], rows[2])
    assert torch.equal(rows[1], rows[6])


def test_nan_affects_only_its_request(name):
    model, expected = copy.deepcopy(generated(name))
    seen = {token for (prompt, _), output in zip(REQUESTS, expected, strict=True) for token in [*prompt, *output]}
    poison = next(token for token in range(3, VOCABULARY) if token not in seen)
    with torch.no_grad():
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())  # NaN is only in these prompts' logits.
        embedding.weight[poison] = torch.nan
    loop = loop_of(name, model, blocks=FEW_BLOCKS)
    sequences, culprits = [], []
    for i, request in enumerate(REQUESTS):
        culprits.append(loop.add([poison] * (100 if i % 4 else 5), 4))
        sequences.append(loop.add(*request))
        loop.step()
    loop.run_all()
    assert sorted(loop.failed, key=id) == sorted(culprits, key=id)
    assert [sequence.output_ids for sequence in sequences] == expected


def test_slots_keep_their_contents_wherever_they_are_moved():
    chosen = random.Random(1)
    slots = Slots([torch.zeros(1, 2), torch.zeros(1)])
    states = {}
    for number in range(1, 200):
        if len(states) > 12 or (states and chosen.random() < 0.3):
            del states[chosen.choice([*states])]
        else:
            states[number] = slots.take()
            slots.write(states[number].slot, [torch.full((1, 2), number), torch.full((1,), number)])
        some = chosen.sample([*states], chosen.randint(0, len(states)))
        slots.gather([states[one] for one in some])
        assert sorted(states[one].slot for one in some) == [*range(len(some))]
        for one, state in states.items():
            assert [float(tensor.sum()) for tensor in slots.view(state.slot, 1)] == [2 * one, one]


def test_beyond_their_limit_states_are_lost_and_computed_again(name):
    expected = generated(name)[1]
    loop = loop_of(name, max_running=6)
    loop.runner.limit(4)
    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    with torch.inference_mode():
        while loop.scheduler.sequences:
            rows = loop.scheduler.schedule(64)
            for few in (rows[:3], rows[3:]):
                if few:
                    loop.run(few)
    assert [sequence.output_ids for sequence in sequences] == expected[:6]
    assert {len(tensor) for tensor in loop.runner._slots.tensors} == {4}


def test_only_layers_with_attention_store_keys():
    model = generated("Qwen 3.5, text")[0]
    assert model.config.num_hidden_layers == 2
    assert cache_shape(model).layers == 1


def test_states_are_memory_of_the_sequences_that_run(monkeypatch):
    model = generated("Qwen 3.5, text")[0]
    with torch.inference_mode():
        size = state_bytes(model)
    assert size == 4 * (4 * 8 * 8 + 64 * 4)  # The delta rule's four heads, and a convolution's last inputs.
    settings, shape = PredictorSettings(), cache_shape(model)
    monkeypatch.setattr(memory, "cache_memory", lambda *_: 100 * size)
    plan = plan_memory("m", model, shape, settings, size)
    assert plan.max_running * size + plan.blocks * 32 * shape.bytes_per_token <= 100 * size
    assert plan.max_running < plan_memory("m", model, shape, settings).max_running or plan.max_running == 32
