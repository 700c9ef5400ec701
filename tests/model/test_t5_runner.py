"""T5 and its family, many sequences at once, equal `generate` of each prompt alone."""

import copy
from functools import cache, partial

import pytest
import torch
import transformers as hf

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.packed_linear import pack_linears
from headrace_predictor.engine.runners.t5 import T5Runner
from headrace_predictor.engine.state.sequence import Row, Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from tests.model.step_loop import END_ID, Loop, make_requests
from tests.random_models import greedy, random_model
from tests.support.requests import submission
from tests.zoo import VOCABULARY

FEW_BLOCKS = 14  # The longest request takes seven.
SMALL = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SMALL |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": END_ID}


REQUESTS = make_requests(24, seed=3)


def t5_loop(model, **limits):
    return Loop(model, partial(T5Runner, model), **limits)


@cache
def generated(architecture):
    """The architecture's model, which tests must not change, and the ids that `generate` gives for each request."""
    model = random_model(architecture)
    return model, [greedy(model, *request) for request in REQUESTS]


@pytest.fixture(params=["compiled", "plain torch"])
def attention(request, monkeypatch):
    if request.param == "plain torch":
        monkeypatch.setattr(kernel, "takes", lambda query: False)
    elif kernel.cpu_attention is None:
        pytest.skip("Numba is not installed")


@pytest.mark.parametrize("architecture", ["t5", "flan"])
def test_a_staggered_and_preempted_crowd_gets_the_answers_of_generate(attention, architecture):
    model, expected = generated(architecture)
    # Else the comparison would hold for models that repeat one token, or that do not see their prompt.
    assert len({tuple(ids) for ids in expected if len(ids) > 4}) == sum(len(ids) > 4 for ids in expected)
    assert sum(len(set(ids)) > 4 for ids in expected) > len(expected) // 2
    loop = t5_loop(model, blocks=FEW_BLOCKS)
    assert loop.run_staggered(REQUESTS) == expected
    assert loop.scheduler.preempted > 0
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total


@cache
def generated_far():
    """A model, and a prompt and its output of `generate`, longer than the model's 128 distinct distances."""
    model, prompt = random_model("flan"), [5, 7, 11]
    return model, prompt, greedy(model, prompt, 140)


def test_distances_beyond_the_largest_distinct_one_are_exact(attention):
    model, prompt, expected = generated_far()
    loop = t5_loop(model)
    sequence = loop.add(prompt, len(expected))
    loop.run_all()
    assert sequence.output_ids == expected


def test_rows_can_be_in_any_order_left_out_or_repeated(attention):
    model, expected = generated("t5")
    loop = t5_loop(model)
    assert loop.run_shuffled(REQUESTS[:10], repeated=1) == expected[:10]


@pytest.mark.parametrize("fault", ["prompt", "output"])
def test_a_row_that_raises_fails_alone(fault):
    model, expected = generated("t5")
    loop = t5_loop(model)
    prompt, length = REQUESTS[0]
    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    bad = ([*prompt, VOCABULARY], length) if fault == "prompt" else (prompt, 3, [5, VOCABULARY])
    culprit = loop.add(*bad)
    sequences += [loop.add(*request) for request in REQUESTS[6:10]]
    loop.run_all()
    assert loop.failed == [culprit]
    assert [sequence.output_ids for sequence in sequences] == expected[:10]


def test_interrupted_steps_can_be_repeated():
    model, expected = generated("t5")
    loop = t5_loop(model)
    passes = 0

    def break_off(module, arguments):
        nonlocal passes
        passes += 1
        if passes % 5 == 0:
            raise RuntimeError("a passing fault")

    sequences = [loop.add(*request) for request in REQUESTS[:4]]
    handle = model.decoder.block[1].layer[-1].register_forward_pre_hook(break_off)
    try:
        while loop.scheduler.sequences:
            rows = loop.scheduler.schedule(64)
            try:
                loop.run(rows)
            except RuntimeError:
                for row in reversed(rows):
                    loop.run([row])
    finally:
        handle.remove()
    assert passes >= 5
    assert [sequence.output_ids for sequence in sequences] == expected[:4]


@pytest.mark.parametrize("step_tokens", [4, 64])
def test_it_continues_from_output_of_any_length(attention, step_tokens):
    model, prompt, expected = generated_far()
    expected = expected[:24]
    # With 4 tokens a step, the earlier output of the request is computed in chunks.
    loop = t5_loop(model, max_running=4, step_tokens=step_tokens)
    sequences = [loop.add(prompt, 24, expected[:given]) for given in range(24)]
    loop.run_all()
    assert [sequence.output_ids for sequence in sequences] == [expected] * 24


def test_the_next_token_depends_on_every_token_of_the_prompt(attention):
    runner = t5_loop(random_model("t5")).runner
    prompt = [5, 7, 11, 13]
    prompts = [prompt, *([*prompt[:i], 17, *prompt[i + 1 :]] for i in range(len(prompt)))]
    rows = []
    for i, ids in enumerate(prompts):
        sampling = SamplingParameters()
        sequence = Sequence(submission("x", ids, sampling), MergingSlot(sampling), frozenset(), runner.start_ids)
        sequence.blocks = [i + 1]
        rows.append(Row(sequence, 0, len(sequence.ids)))
    with torch.inference_mode():
        logits = runner.run(rows)
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() > 0.1 * logits[0].abs().max()


def test_nan_affects_only_its_request(attention):
    model, expected = copy.deepcopy(generated("flan"))
    requests, expected = REQUESTS[:12], expected[:12]
    seen = {token for (prompt, _), output in zip(requests, expected, strict=True) for token in [*prompt, *output]}
    poison = next(token for token in range(3, VOCABULARY) if token not in seen)
    with torch.no_grad():
        # NaN is only in these prompts' logits, not in every token's.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.shared.weight[poison] = torch.nan
    loop = t5_loop(model, blocks=FEW_BLOCKS)
    sequences, culprits = [], []
    for i, request in enumerate(requests):
        # The long one fills most of the blocks, which others use after it.
        culprits.append(loop.add([poison] * (150 if i % 4 else 5), 4))
        sequences.append(loop.add(*request))
        loop.step()
    loop.run_all()
    assert sorted(loop.failed, key=id) == sorted(culprits, key=id)
    assert [sequence.output_ids for sequence in sequences] == expected


def test_bfloat16_with_packed_weights_is_as_near_as_transformers_own():
    model = random_model("flan")
    prompt, output = REQUESTS[6][0], [9, 8, 7, 6]

    def transformers_logits():
        ids = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[0, *output]])}
        with torch.inference_mode():
            return model(**ids).logits[0, -1].float()

    exact = transformers_logits()
    model.to(torch.bfloat16)
    allowed = 2 * (transformers_logits() - exact).abs().max()
    pack_linears(model)
    loop = t5_loop(model)
    sequence = loop.add(prompt, 8, output)
    rows = loop.scheduler.schedule(1000)
    with torch.inference_mode():
        logits = loop.runner.run(rows)
    assert (rows[0].sequence, rows[0].samples) == (sequence, True)
    assert (logits[0].float() - exact).abs().max() < allowed


def test_other_architectures_are_refused():
    assert T5Runner.supports(random_model("t5"))
    assert not T5Runner.supports(random_model("bart"))
    assert not T5Runner.supports(hf.LongT5ForConditionalGeneration(hf.LongT5Config(**SMALL, local_radius=7)))
