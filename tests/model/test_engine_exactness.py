"""Crowded, chunked, preempted, sampled, resumed: every request gets the same answer as alone."""

import contextlib
import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch

from headrace.errors import StartupError
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.runners import attention, own_attention
from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.models.weights import multiplies_bfloat16
from tests.model.random_crowd import (
    LENGTHS,
    PROMPTS,
    crowd,
    generate_crowd,
    model_and_crowd,
    random_engines,
    read_all,
    request,
)
from tests.random_models import LIMITED, PAGED, greedy, initialised_model, random_model
from tests.support.full import FULL, usually
from tests.support.in_process_engine import submit
from tests.support.threads import torch_threads
from tests.zoo import FAMILIES, VOCABULARY

# Of PAGED: sliding window and grouped queries; rotary positions; learned positions.
PORTABLE = ("gemma3", "llama", "opt")


@pytest.fixture
def engine_of():
    with random_engines() as make:
        yield make


@pytest.mark.parametrize(
    "architecture", [*PORTABLE, *(pytest.param(name, marks=pytest.mark.full) for name in PAGED if name not in PORTABLE)]
)
async def test_the_portable_attention_gives_the_same(architecture, engine_of, monkeypatch):
    monkeypatch.setattr(kernel, "takes", lambda query: False)
    model, expected = model_and_crowd(architecture)
    assert await crowd(engine_of(model, cache_tokens=400)) == expected


@pytest.mark.skipif(not multiplies_bfloat16(), reason="torch's attention adds up in another order here")
@pytest.mark.parametrize("name", usually(("falcon_rw",), [*PAGED]))
async def test_answers_in_bfloat16_are_those_alone(name, engine_of):
    engine = engine_of(random_model(name).to(torch.bfloat16), dtype="bf16")
    assert engine.description["runner"] == "paged"
    alone = [await read_all(submit(engine, request(str(i), prompt, 33))) for i, prompt in enumerate(PROMPTS)]
    together = [submit(engine, request(str(i), prompt, 33)) for i, prompt in enumerate(PROMPTS)]
    assert [await read_all(slot) for slot in together] == alone


async def test_several_threads_give_the_same(engine_of):
    with torch_threads(2):
        model, expected = model_and_crowd("qwen3")
        assert await crowd(engine_of(model)) == expected


@pytest.mark.parametrize(
    ("architecture", "dtype", "count"),
    [
        ("llama", torch.float32, 70),
        pytest.param("gpt2", torch.float32, 16, marks=pytest.mark.full),
        ("t5", torch.float32, 16),
        ("llama", torch.bfloat16, 16),
    ],
)
async def test_sampling_gives_the_same_alone_in_a_crowd_and_continued(architecture, dtype, count, engine_of):
    model = random_model(architecture).to(dtype)
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1, "presence_penalty": 0.3}

    def sampled(i, **given):
        return request(f"r{i}", PROMPTS[i % 12], 12, **{**sampling, "seed": i, **given})

    alone_engine, engine = engine_of(model, max_running=1), engine_of(model, 9000, max_running=count, max_waiting=99)
    alone = [await read_all(submit(alone_engine, sampled(i))) for i in range(count)]
    assert len({tuple(ids) for ids in alone}) == count
    slots = [submit(engine, sampled(i)) for i in range(count)]
    assert [await read_all(slot) for slot in slots] == alone
    slots = [submit(engine, sampled(i, output_ids=alone[i][: 1 + i % 11])) for i in range(count)]
    assert [alone[i][: 1 + i % 11] + await read_all(slot) for i, slot in enumerate(slots)] == alone


async def test_a_continuation_from_every_prefix_gives_the_same(engine_of):
    engine = engine_of(random_model("opt"))
    whole = await read_all(submit(engine, request("whole", PROMPTS[7], 12, temperature=1.0)))
    for cut in range(1, 12):
        rest = await read_all(submit(engine, request("rest", PROMPTS[7], 12, whole[:cut], temperature=1.0)))
        assert whole[:cut] + rest == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
async def test_other_dtypes_are_served(engine_of, dtype):
    model = random_model("llama").to(dtype)
    results, expected = await crowd(engine_of(model)), generate_crowd(model)
    if dtype == torch.float64:
        assert results == expected
    else:
        # Rounding differs between batch shapes; most generated tokens do not.
        same = sum(
            a == b for ids, wanted in zip(results, expected, strict=True) for a, b in zip(ids, wanted, strict=True)
        )
        assert same > 0.5 * sum(LENGTHS)


@pytest.mark.parametrize(
    "architecture",
    usually(("phi3_long", "llama_dynamic", "llama4_tuned", "deepseek_v32"), [*LIMITED, "llama4_tuned", "deepseek_v32"]),
)
async def test_cached_prefixes_and_continuations_across_a_limit_give_the_same(architecture, engine_of):
    """Prompts and answers on both sides of it: of 20, 26 and 37 ids with answers of 12, and their next turns."""
    model = random_model(architecture)
    engine = engine_of(model)
    for length in (20, 26, 37):
        prompt = PROMPTS[-1][:length]
        answer = greedy(model, prompt, 12)
        turn = [*prompt, *answer, *PROMPTS[3]]
        expected = [answer, answer, greedy(model, turn, 9)]
        slots = [submit(engine, request(f"{length}", ids, n)) for ids, n in ((prompt, 12), (prompt, 12), (turn, 9))]
        assert [await read_all(slot) for slot in slots] == expected
        for cut in (1, 5, 11):
            rest = await read_all(submit(engine, request("rest", prompt, 12, answer[:cut])))
            assert answer[:cut] + rest == answer


def proof_of(model, context=200, packed=4096):
    with torch.inference_mode():
        return Proof(model, cache_shape(model), VOCABULARY, context, packed)


def unlimited(plan, reach):
    return torch.zeros_like(plan.ends)


def of_the_longest(rotary, rows):
    return contextlib.nullcontext()


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("architecture", "target", "name", "fault"),
    [
        ("mistral", StepPlan, "firsts", unlimited),
        ("gemma3", StepPlan, "firsts", unlimited),
        ("llama4", StepPlan, "firsts", unlimited),
        ("phimoe", StepPlan, "firsts", unlimited),
        ("gpt_neo", StepPlan, "firsts", unlimited),
        ("phimoe", SequenceRotary, "packed", of_the_longest),
        ("phi3_long", SequenceRotary, "packed", of_the_longest),
        ("llama_long", SequenceRotary, "packed", of_the_longest),
        ("llama_dynamic", SequenceRotary, "packed", of_the_longest),
    ],
)
def test_the_proof_finds_a_limit_that_is_ignored(architecture, target, name, fault, scaled, monkeypatch):
    """Also where it is far away, and in a model as it is initialised, which hardly depends on its context."""

    def model():
        return random_model(architecture) if scaled else initialised_model(architecture)

    with torch.inference_mode():
        assert proof_of(model()).of_paged() is None
        monkeypatch.setattr(target, name, fault)
        assert "differ" in (proof_of(model()).of_paged() or "")


@pytest.mark.parametrize("architecture", ["bloom", "falcon_rw", "mpt"])
def test_the_proof_finds_wrong_biases_and_leaves_the_model_its_own_attention(architecture, monkeypatch):
    def without_bias(layer, query, key, value, scores):
        return attention.attend(layer, query, key, value, scores._replace(bias=None))

    model, ids = random_model(architecture), torch.tensor([PROMPTS[5]])
    monkeypatch.setattr(own_attention, "attend", without_bias)
    with torch.inference_mode():
        expected = model(ids).logits
        proof = proof_of(model)
        assert "differ" in (proof.of_paged() or "")
        assert torch.equal(model(ids).logits, expected)
        assert proof.other_runner(6, "")[0].description == "one row"


def test_scaled_positions_that_no_runner_computes_are_refused(monkeypatch):
    """A runner without a cache would give all keys the factors of the whole length, which `generate` does not."""
    monkeypatch.setattr(SequenceRotary, "packed", lambda *_: [][0])
    with torch.inference_mode(), pytest.raises(StartupError, match="scaled by the length of a sequence, and no runner"):
        proof_of(random_model("llama_dynamic")).other_runner(6, "")


@pytest.mark.parametrize("name", usually(("Phi 3.5 MoE", "UMT5"), ["Mixtral", "Phi 3.5 MoE", "Granite 3 MoE", "UMT5"]))
def test_rounding_is_no_reason_for_a_slower_runner(name, monkeypatch):
    """By another rounding an id of a mixture has other experts, and quite different logits."""
    (family,) = (family for family in FAMILIES if family.name == name)
    deep = replace(family, given=family.given | {"num_hidden_layers": 4})

    def reason(seed):
        model = deep.model(seed).to(torch.bfloat16)
        with torch.inference_mode():
            proof = proof_of(model)
            if model.config.is_encoder_decoder:
                return proof.encoder_decoder_runner(6)[1]
            proof.check_generate("m")
            reason = proof.of_paged()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        return reason

    assert {reason(seed) for seed in range(4 if FULL else 2)} == {None}
    if "sliding_window" in family.given:
        monkeypatch.setattr(StepPlan, "firsts", unlimited)
        assert "differ" in (reason(0) or "")


def test_the_proof_leaves_the_limits_as_they_are():
    for architecture in ("gemma3", "llama4", "phimoe", "llama_dynamic"):
        model = random_model(architecture)
        before, ids = copy.deepcopy(model), torch.tensor([PROMPTS[-1][:20]])
        with torch.inference_mode():
            assert proof_of(model).of_paged() is None
            reaches = [module.reach for module in model.modules() if hasattr(module, "reach")]
            assert reaches == [module.reach for module in before.modules() if hasattr(module, "reach")]
            model.set_attn_implementation(before.config._attn_implementation)
            assert model.config.to_dict() == before.config.to_dict()
            assert torch.equal(model(ids).logits, before(ids).logits)


def test_the_proof_of_a_deep_decoder_computes_two_layers_of_each_kind(monkeypatch):
    (family,) = (family for family in FAMILIES if family.name == "Qwen 2 with a window")
    sizes = {"num_hidden_layers": 12, "max_window_layers": 3, "vocab_size": 5000, "tie_word_embeddings": True}
    deep = replace(family, given=family.given | sizes)
    computed, logits = Counter(), set()
    model = deep.model(0).to(torch.bfloat16)
    model.lm_head.register_forward_hook(lambda module, args, output: logits.add(output.shape[-1]))
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: computed.update([index]))
    with torch.inference_mode():
        proof = proof_of(model)
        proof.check_generate("m")
        assert proof.of_paged() is None
        assert [bool(layer.self_attn.reach.window) for layer in model.model.layers] == [False] * 3 + [True] * 9
        assert not any(computed[index] for index in range(5, 12))
        assert logits == {4096}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert min(computed[index] for index in range(5)) > 10
        monkeypatch.setattr(StepPlan, "firsts", unlimited)
        assert "differ" in (proof_of(deep.model(0)).of_paged() or "")


def test_the_proof_finds_a_model_whose_attention_is_not_replaced():
    model = random_model("llama")
    with torch.inference_mode():
        assert proof_of(model).of_paged() is None
        assert model.config._attn_implementation == attention.NAME
        model.set_attn_implementation("sdpa")
        for layer in model.model.layers:
            layer.self_attn.config = copy.deepcopy(layer.self_attn.config)  # It does not follow the model's.
        assert "masks" in (proof_of(model).of_paged() or "")
    assert model.config._attn_implementation != attention.NAME
