"""Runners of encoder-decoder models and of models with recurrent states: many sequences equal `generate` of each."""

import copy
import random
from functools import cache, partial

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation, NewGELUActivation, QuickGELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.cpu.packed_linear import pack_called, pack_linears
from headrace_predictor.engine.runners import memory, row
from headrace_predictor.engine.runners.encoder_decoder import EncoderDecoderRunner
from headrace_predictor.engine.runners.hybrid import HybridRunner
from headrace_predictor.engine.runners.memory import cache_shape, plan_memory
from headrace_predictor.engine.runners.reach import find_reaches
from headrace_predictor.engine.runners.row import CausalRunner
from headrace_predictor.engine.runners.shortened import shorten
from headrace_predictor.engine.runners.states import Slots, key_layers, state_bytes
from headrace_predictor.engine.state.sequence import Row
from headrace_predictor.settings import PredictorSettings
from tests.model.step_loop import Loop, make_requests
from tests.random_models import greedy
from tests.support.full import usually
from tests.zoo import FAMILIES, VOCABULARY

FEW_BLOCKS = 14  # The longest request takes seven.
REQUESTS = make_requests(16, seed=3)
# A relative bias, learned positions, computed ones that depend on the ids, rotary ones with windows.
SEQ2SEQ = dict.fromkeys(("T5", "FLAN-T5", "BART", "M2M, NLLB", "LongT5", "T5Gemma"), EncoderDecoderRunner)
# With attention in other layers, in the same, and without; prompts as a whole, and rows one by one.
HYBRID = {
    "Qwen 3.5, text": HybridRunner,
    "Falcon-H1": HybridRunner,
    "Mamba": partial(HybridRunner, whole=True),
    "RWKV": partial(HybridRunner, together=False),
}
RUNNERS = {**SEQ2SEQ, **HYBRID}
# Of each runner; the others, which differ by their model alone, run with FULL=1 beside the crowds below.
USUAL = {"T5", "Qwen 3.5, text", "RWKV"}
_FAMILIES = {family.name: family for family in FAMILIES}


def each(names, usual=USUAL):
    return pytest.mark.parametrize("name", usually(usual, names))


@cache
def generated(name):
    """The family's model, which tests must not change, and the ids that `generate` gives for each request."""
    model = _FAMILIES[name].model()
    return model, [greedy(model, *request) for request in REQUESTS]


def loop_of(name, model=None, **limits):
    model = copy.deepcopy(generated(name)[0]) if model is None else model
    if name in HYBRID and key_layers(model.config):
        with torch.inference_mode():
            find_reaches(model, 256)
    loop = Loop(model, partial(RUNNERS[name], model), **limits)
    loop.model = model
    return loop


def second_layer(name, model):
    """The decoder's second layer."""
    if name == "RWKV":
        return model.rwkv.blocks[1]
    if name in HYBRID:
        return model.base_model.layers[1]
    decoder = model.get_decoder()
    return (decoder.block if hasattr(decoder, "block") else decoder.layers)[1]


# tests/model/test_zoo.py has crowds of the others with compiled attention.
@pytest.mark.parametrize(
    ("name", "is_compiled"),
    [
        *((name, True) for name in ("LongT5", "T5Gemma", "Falcon-H1", "RWKV")),
        ("T5", False),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("FLAN-T5", "M2M, NLLB", "Qwen 3.5, text")),
        *(pytest.param(name, False, marks=pytest.mark.full) for name in ("BART", "LongT5", "T5Gemma")),
    ],
)
def test_a_staggered_and_preempted_crowd_gets_the_answers_of_generate(name, is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(kernel, "takes", lambda query: False)
    expected = generated(name)[1]
    # Else the comparison would hold for models that repeat one token, or that do not see their prompt.
    assert sum(len(set(ids)) > 4 for ids in expected) > len(expected) // 2
    loop = loop_of(name, blocks=FEW_BLOCKS)
    assert loop.run_staggered(REQUESTS) == expected
    assert loop.scheduler.preempted > 0
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total


@each(RUNNERS)
def test_rows_can_be_in_any_order_left_out_or_repeated(name):
    repeated = 0.2 if name in HYBRID else 1
    assert loop_of(name).run_shuffled(REQUESTS[:8], repeated) == generated(name)[1][:8]


@each(RUNNERS)
def test_interrupted_steps_can_be_repeated(name):
    loop = loop_of(name)
    passes = interrupted = 0
    is_armed = True

    def break_off(*_):
        nonlocal passes
        passes += 1
        if is_armed and passes % 3 == 0:
            raise RuntimeError("a passing fault")

    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    second_layer(name, loop.model).register_forward_pre_hook(break_off)
    while loop.scheduler.sequences:
        rows, is_armed = loop.scheduler.schedule(64), True
        try:
            loop.run(rows)
        except RuntimeError:
            interrupted, is_armed = interrupted + 1, False
            for row in reversed(rows):
                loop.run([row])
    assert interrupted >= 5
    assert [sequence.output_ids for sequence in sequences] == generated(name)[1][:6]


@each(SEQ2SEQ)
def test_a_prompt_that_fails_between_layers_leaves_rows_that_decode_as_they_are(name):
    loop = loop_of(name)
    sequence = loop.add(*REQUESTS[0])
    loop.step()

    def break_off(*_):
        raise IndexError("the prompt's fault")

    loop.add([5, 7, 11], 8)
    handle = second_layer(name, loop.model).register_forward_pre_hook(break_off)
    rows = loop.scheduler.schedule(64)
    (newcomer,) = (row for row in rows if row.start == 0)
    with pytest.raises(IndexError), torch.inference_mode():
        loop.runner.run([newcomer])
    handle.remove()
    loop.run([row for row in rows if row is not newcomer])
    loop.fail(newcomer.sequence)
    loop.run_all()
    assert sequence.output_ids == generated(name)[1][0]


@each(["T5", "BART", "Qwen 3.5, text"])
@pytest.mark.parametrize("fault", ["prompt", "output"])
def test_a_row_that_raises_fails_alone(name, fault):
    loop = loop_of(name)
    prompt, length = REQUESTS[0]
    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    culprit = loop.add([*prompt, VOCABULARY], length) if fault == "prompt" else loop.add(prompt, 3, [5, VOCABULARY])
    sequences += [loop.add(*request) for request in REQUESTS[6:10]]
    loop.run_all()
    assert loop.failed == [culprit]
    assert [sequence.output_ids for sequence in sequences] == generated(name)[1][:10]


@each(RUNNERS)
@pytest.mark.parametrize("step_tokens", [4, 64])
def test_it_continues_from_output_of_any_length(name, step_tokens):
    """With 4 tokens a step, the earlier output of a request is computed in chunks."""
    prompt = [5, 7, 11]
    expected = greedy(generated(name)[0], prompt, 16)
    loop = loop_of(name, max_running=4, step_tokens=step_tokens)
    sequences = [loop.add(prompt, 16, expected[:given]) for given in range(16)]
    loop.run_all()
    assert [sequence.output_ids for sequence in sequences] == [expected] * 16


@each(SEQ2SEQ | HYBRID)
def test_rows_that_decode_pass_the_model_together(name):
    loop = loop_of(name)
    for _ in range(8):
        loop.add([5, 7, 11], 8)
    passes = []
    loop.model.register_forward_pre_hook(lambda *_: passes.append(None))
    while any(not sequence.output_ids for sequence in loop.scheduler.sequences):
        loop.step()
    passes.clear()
    loop.step()
    assert len(passes) == (8 if name == "RWKV" else 1)


@each(SEQ2SEQ)
def test_prompts_pass_the_encoder_together(name):
    loop = loop_of(name, step_tokens=1000)
    sequences = [loop.add([5, 7, 11, 13][:count], 4) for count in (1, 4, 2, 3, 4, 2)]
    passes = []
    loop.model.get_encoder().register_forward_pre_hook(lambda *_: passes.append(None))
    loop.step()
    assert all(sequence.output_ids for sequence in sequences)
    assert len(passes) == 1


@each(["FLAN-T5", *HYBRID], ("FLAN-T5", "Qwen 3.5, text"))
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
        # The long one fills most of the blocks, which others use after it.
        culprits.append(loop.add([poison] * (100 if i % 4 else 5), 4))
        sequences.append(loop.add(*request))
        loop.step()
    loop.run_all()
    assert sorted(loop.failed, key=id) == sorted(culprits, key=id)
    assert [sequence.output_ids for sequence in sequences] == expected


@pytest.mark.parametrize("is_compiled", [True, False])
def test_distances_beyond_the_largest_distinct_one_are_exact(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(kernel, "takes", lambda query: False)
    prompt = [5, 7, 11]
    expected = greedy(generated("FLAN-T5")[0], prompt, 140)  # The model has 128.
    loop = loop_of("FLAN-T5")
    sequence = loop.add(prompt, len(expected))
    loop.run_all()
    assert sequence.output_ids == expected


def test_bfloat16_with_packed_weights_is_as_near_as_transformers_own():
    model = copy.deepcopy(generated("FLAN-T5")[0])
    prompt, output = REQUESTS[6][0], [9, 8, 7, 6]

    def transformers_logits():
        ids = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[0, *output]])}
        with torch.inference_mode():
            return model(**ids).logits[0, -1].float()

    exact = transformers_logits()
    model.to(torch.bfloat16)
    allowed = 2 * (transformers_logits() - exact).abs().max()
    pack_linears(model)
    loop = loop_of("FLAN-T5", model)
    loop.add(prompt, 8, output)
    with torch.inference_mode():
        logits = loop.runner.run(loop.scheduler.schedule(1000))
    assert (logits[0].float() - exact).abs().max() < allowed


def test_experts_that_leave_out_tokens_of_a_crowd_are_refused():
    model = _FAMILIES["NLLB MoE"].model()
    Loop(model, partial(EncoderDecoderRunner, model))
    model.config.moe_eval_capacity_token_fraction = 0.5
    with pytest.raises(ValueError, match="experts leave out tokens"):
        Loop(model, partial(EncoderDecoderRunner, model))


@each([name for name in RUNNERS if name != "Mamba"])
def test_a_row_has_the_same_logits_in_every_crowd(name):
    """To the last bit, with packed products; Mamba 1 has one that cannot be packed."""
    rows, prompts = {}, [prompt for prompt, _ in REQUESTS[:6]]
    for crowd in ([0], [0, 1], [5, 0, 3, 2, 1, 4]):
        loop = loop_of(name, step_tokens=1000)
        with torch.inference_mode():
            pack_called(loop.model, loop.runner.probe)
            shorten(loop.model)
            if name in SEQ2SEQ:
                loop.runner.drop_biases()
            for index in crowd:
                loop.add(prompts[index], 8, [9] * 3)
            loop.run(loop.scheduler.schedule(1000))
            logits = loop.runner.run(loop.scheduler.schedule(1000))
        rows[len(crowd)] = logits[crowd.index(0)]
    assert torch.equal(rows[1], rows[2])
    assert torch.equal(rows[1], rows[6])


@pytest.mark.parametrize(
    ("kind", "is_short"),
    [(BloomGelu, True), (NewGELUActivation, True), (GELUActivation, False), (QuickGELUActivation, False)],
)
def test_a_gelu_by_the_hyperbolic_tangent_is_one_operation(kind, is_short):
    model, x = nn.Sequential(kind()), torch.linspace(-9, 9, 777)
    expected = model(x)
    shorten(model)
    torch.testing.assert_close(model(x), expected)
    assert ("forward" in vars(model[0])) == is_short


@pytest.mark.parametrize(
    "norm",
    [
        Qwen3NextRMSNormGated(64),
        GraniteMoeHybridRMSNormGated(64, group_size=32),
        *(FalconH1RMSNormGated(64, n_groups=2, norm_before_gate=first) for first in (True, False)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_gated_norm_is_one_operation(norm):
    x, gate = torch.randn(2, 3, 5, 64)
    norm.weight.data = torch.randn(64)
    expected = norm(x, gate)
    shorten(norm)
    torch.testing.assert_close(norm(x, gate), expected)
    assert "forward" in vars(norm)


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


PREFIX = [(37 * n * n + 11 * n) % (VOCABULARY - 3) + 3 for n in range(140)]
PREFIXED = [[*PREFIX, *PREFIX[n : n + length]] for n, length in enumerate((1, 50, 50, 18, 50, 90))]


@each([name for name in HYBRID if name != "Mamba"])
def test_a_prompt_that_continues_from_states_of_its_prefix_has_the_bits_that_it_has_without(name):
    def answer(loop, prompt):
        computed, own = [], loop.runner.run
        loop.runner.run = lambda rows: computed.append(own(rows).clone()) or computed[-1].clone()
        sequence = loop.add(prompt, 6)
        loop.run_all()
        loop.runner.run = own
        return sequence, torch.cat(computed)

    shared = loop_of(name, step_tokens=1000)
    for cached, prompt in zip((0, 128, 128, 128), (PREFIXED[0], *PREFIXED[:3]), strict=True):
        (sequence, logits), (plain, expected) = answer(shared, prompt), answer(loop_of(name, step_tokens=1000), prompt)
        assert (sequence.cached_tokens, plain.cached_tokens) == (cached, 0)
        assert sequence.output_ids == plain.output_ids == greedy(generated(name)[0], prompt, 6)
        assert torch.equal(logits, expected)


@each([name for name in HYBRID if name != "Mamba"])
@pytest.mark.parametrize("limit", usually([2], [2, 3]))
def test_states_of_prefixes_survive_preemption_and_take_the_slots_that_sequences_leave(name, limit):
    loop = loop_of(name, blocks=10, max_running=limit, step_tokens=1000)
    loop.runner.limit(limit)
    requests = [(prompt, 12) for prompt in PREFIXED * 2] + [([*reversed(PREFIX)], 12)]
    sequences = [loop.add(*request) for request in requests]
    kept = []
    while loop.scheduler.sequences:
        loop.step()
        kept.append(len(loop.runner.prefix_states))
    assert [sequence.output_ids for sequence in sequences] == [greedy(generated(name)[0], *one) for one in requests]
    assert loop.scheduler.preempted > 0
    assert max(kept) <= limit
    assert sum(sequence.cached_tokens for sequence in sequences) > 0
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total


@each([name for name in HYBRID if name != "Mamba"])
def test_a_prefix_that_two_prompts_share_is_kept_for_the_third(name):
    loop, sequences = loop_of(name), []
    for tail in (60, 61, 62):
        sequences.append(loop.add([*PREFIX, *range(tail, tail + 130)], 4))
        loop.run_all()
    assert [sequence.cached_tokens for sequence in sequences] == [0, 0, 128]


def test_copies_of_states_give_way_to_sequences():
    slots = Slots([torch.zeros(1)])
    slots.most = 4
    running = [slots.take() for _ in range(2)]
    for number, state in enumerate(running):
        state.done = number + 1
        slots.write(state.slot, [torch.full((1,), number)])
        slots.keep(b"%d" % number, state)
    assert [*slots.copies] == [b"0", b"1"]
    assert slots.restore(b"2") is None
    restored = slots.restore(b"0")  # Into the copy's own slot: all are taken.
    assert (restored.done, float(slots.view(restored.slot, 1)[0])) == (1, 0.0)
    running += [restored, slots.take()]
    assert not slots.copies
    slots.keep(b"3", running[0])
    assert not slots.copies
    assert sorted(state.slot for state in running) == [0, 1, 2, 3]


@each(HYBRID)
def test_beyond_their_limit_states_are_lost_and_computed_again(name):
    loop = loop_of(name, max_running=6)
    loop.runner.limit(4)
    sequences = [loop.add(*request) for request in REQUESTS[:6]]
    with torch.inference_mode():
        while loop.scheduler.sequences:
            rows = loop.scheduler.schedule(64)
            for few in (rows[:3], rows[3:]):
                if few:
                    loop.run(few)
    assert [sequence.output_ids for sequence in sequences] == generated(name)[1][:6]


def test_states_are_memory_of_the_sequences_that_run(monkeypatch):
    model = generated("Qwen 3.5, text")[0]
    with torch.inference_mode():
        size = state_bytes(model)
    assert size == 4 * (4 * 8 * 8 + 64 * 4)  # The delta rule's four heads, and a convolution's last inputs.
    settings, shape = PredictorSettings(), cache_shape(model)
    assert (model.config.num_hidden_layers, shape.layers) == (2, 1)  # Only layers with attention store keys.
    monkeypatch.setattr(memory, "cache_memory", lambda *_: 100 * size)
    plan = plan_memory("m", model, shape, settings, size)
    assert plan.max_running * size + plan.blocks * 32 * shape.bytes_per_token <= 100 * size
    assert plan.max_running < plan_memory("m", model, shape, settings).max_running or plan.max_running == 32


def test_what_a_failed_pass_has_lost_is_computed_in_parts(monkeypatch):
    monkeypatch.setattr(row, "_AGAIN", 8)
    model, lengths = _FAMILIES["GPT-2"].model(), []
    loop = Loop(model, lambda *_: CausalRunner(model))
    sequence = loop.add(list(range(3, 33)), 2)
    with torch.inference_mode():
        expected = loop.runner.run([Row(sequence, 0, 30)])
        sequence.state = None
        model.register_forward_pre_hook(lambda *given: lengths.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
        logits = loop.runner.run([Row(sequence, 29, 1)])
    assert lengths == [8, 8, 8, 6]
    torch.testing.assert_close(logits, expected)
