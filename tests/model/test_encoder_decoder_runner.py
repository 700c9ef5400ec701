"""Encoder-decoder models other than T5, many sequences at once, equal `generate` of each prompt alone."""

import copy
from functools import cache, partial

import pytest
import torch

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.runners.encoder_decoder import EncoderDecoderRunner
from tests.model.step_loop import Loop, make_requests
from tests.random_models import greedy
from tests.zoo import FAMILIES

FEW_BLOCKS = 14  # The longest request takes four.
REQUESTS = make_requests(12, seed=3)
# Learned positions, computed ones that depend on the ids, a relative bias, rotary ones with windows.
NAMES = ("BART", "M2M, NLLB", "LongT5", "T5Gemma")
_FAMILIES = {family.name: family for family in FAMILIES}


@cache
def generated(name):
    """The family's model, which tests must not change, and the ids that `generate` gives for each request."""
    model = _FAMILIES[name].model()
    return model, [greedy(model, *request) for request in REQUESTS]


def loop_of(name, **limits):
    model = copy.deepcopy(generated(name)[0])
    return Loop(model, partial(EncoderDecoderRunner, model), **limits)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(params=["compiled", "plain torch"])
def attention(request, monkeypatch):
    if request.param == "plain torch":
        monkeypatch.setattr(kernel, "takes", lambda query: False)


def test_a_staggered_and_preempted_crowd_gets_the_answers_of_generate(name, attention):
    expected = generated(name)[1]
    loop = loop_of(name, blocks=FEW_BLOCKS)
    assert loop.run_staggered(REQUESTS) == expected
    assert loop.scheduler.preempted > 0
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total


def test_rows_can_be_in_any_order_left_out_or_repeated(name):
    expected = generated(name)[1]
    loop = loop_of(name)
    assert loop.run_shuffled(REQUESTS[:8], repeated=1) == expected[:8]


@pytest.mark.parametrize("step_tokens", [4, 64])
def test_it_continues_from_output_of_any_length(name, step_tokens):
    model = generated(name)[0]
    prompt = [5, 7, 11]
    expected = greedy(model, prompt, 16)
    loop = loop_of(name, max_running=4, step_tokens=step_tokens)
    sequences = [loop.add(prompt, 16, expected[:given]) for given in range(16)]
    loop.run_all()
    assert [sequence.output_ids for sequence in sequences] == [expected] * 16


def test_an_interrupted_pass_leaves_the_model_as_it_was(name):
    model = copy.deepcopy(generated(name)[0])
    loop = Loop(model, partial(EncoderDecoderRunner, model))
    prompt, length = REQUESTS[0]
    sequence = loop.add(prompt, length)
    decoder = model.get_decoder()
    layers = decoder.block if hasattr(decoder, "block") else decoder.layers

    def break_off(*_):
        raise RuntimeError("a passing fault")

    for _ in range(3):
        rows = loop.scheduler.schedule(64)
        handle = layers[1].register_forward_pre_hook(break_off)
        with pytest.raises(RuntimeError, match="passing"):
            loop.run(rows)
        handle.remove()
        assert model.config._attn_implementation == generated(name)[0].config._attn_implementation
        loop.run(rows)
    loop.run_all()
    assert sequence.output_ids == generated(name)[1][0]


def test_a_prompt_that_fails_between_layers_leaves_rows_that_decode_as_they_are(name):
    loop = loop_of(name)
    sequence = loop.add(*REQUESTS[0])
    loop.step()
    decoder = loop.runner._model.get_decoder()
    layers = decoder.block if hasattr(decoder, "block") else decoder.layers

    def break_off(*_):
        raise IndexError("the prompt's fault")

    loop.add([5, 7, 11], 8)
    handle = layers[1].register_forward_pre_hook(break_off)
    rows = loop.scheduler.schedule(64)
    (newcomer,) = (row for row in rows if row.start == 0)
    with pytest.raises(IndexError), torch.inference_mode():
        loop.runner.run([newcomer])
    handle.remove()
    loop.run([row for row in rows if row is not newcomer])
    loop.fail(newcomer.sequence)
    loop.run_all()
    assert sequence.output_ids == generated(name)[1][0]


def test_rows_that_decode_pass_the_decoder_together(name):
    loop = loop_of(name)
    for _ in range(8):
        loop.add([5, 7, 11], 8)
    passes = []
    loop.runner._model.register_forward_pre_hook(lambda *_: passes.append(None))
    while any(not sequence.output_ids for sequence in loop.scheduler.sequences):
        loop.step()
    passes.clear()
    loop.step()
    assert len(passes) == 1


def test_experts_that_leave_out_tokens_of_a_crowd_are_refused():
    model = _FAMILIES["NLLB MoE"].model()
    Loop(model, partial(EncoderDecoderRunner, model))
    model.config.moe_eval_capacity_token_fraction = 0.5
    with pytest.raises(ValueError, match="experts leave out tokens"):
        Loop(model, partial(EncoderDecoderRunner, model))
