"""Adapters in a batch with each other and the base: each row is that of its merged model and depends on no other."""

import copy
import gc
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from headrace.models.generation_config import GenerationRules
from headrace.models.sources import ModelSource
from headrace_predictor.engine.adapters import Adapters
from headrace_predictor.engine.cpu.integer_linear import Quantisation
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.packed_linear import pack_linears
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.streamed import GATED_MODELS, StreamedDecoder
from headrace_predictor.engine.state.sequence import Row, detached_sequence
from headrace_transformer.text.model_text import AdapterBase, BaseNeededError, read_text
from tests.model.random_crowd import PROMPTS, random_engines, read_all, request
from tests.model.test_streamed import CACHES
from tests.random_adapters import merge, save_random_adapter
from tests.random_models import PAGED, greedy, random_model, save_random_model
from tests.support import plain_kernels
from tests.support.chat_prompts import chat_prompt
from tests.support.in_process_engine import submit
from tests.zoo import VOCABULARY

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTH = 45
# Some layers only, as most adapters have it: the rest of a joined product is zero.
TARGETS = {
    1: "",
    2: "q_proj|v_proj|up_proj|fc1|c_attn|qkv_proj|query_key_value|gate_up_proj",
    3: "o_proj|out_proj|gate_proj|fc2|c_proj|dense",
}


def runner_of(model, format_=None, operations=None):
    is_streamed = format_ is not None and type(model) in GATED_MODELS
    adapters = Adapters(model, torch.float32 if is_streamed else None)
    streamed = StreamedDecoder(model, format_, 2) if is_streamed else None
    if not format_:
        pack_linears(model)
    runner = PagedRunner(model, cache_shape(model), 64, adapters, streamed=streamed, operations=operations)
    if format_ and not is_streamed:
        with torch.inference_mode():
            Quantisation(format_, lambda size: PackedFile())(model, runner.probe)
    runner.adapters = adapters
    return runner


def sequences(runner, numbers):
    """Sequences of these adapters with blocks of their own, of different ids."""
    found = []
    for place, number in enumerate(numbers):
        sequence = detached_sequence([(7 * i + 13 * place + 1) % VOCABULARY for i in range(LENGTH)])
        sequence.blocks = [1 + 2 * place, 2 + 2 * place]
        sequence.adapter = runner.adapters.get(number)
        found.append(sequence)
    return found


def logits(runner, numbers, places=None):
    """The logits of steps with chunks, with chunks and decodes, and with decodes; by place, of rows that sample."""
    every = sequences(runner, numbers)
    # A row's own neighbours change, and the order of the rows, but not what they compute.
    places = list(range(len(every))) if places is None else places
    ids = {place: list(every[place].ids) for place in places}
    computed = dict.fromkeys(places, 0)
    found = {place: [] for place in places}
    with torch.inference_mode():
        for step in range(5):
            rows = []
            for place in places:
                end = min(LENGTH, computed[place] + (20 if place % 2 or step else 44))
                if computed[place] >= 44:
                    end = computed[place] + 1
                every[place].ids = ids[place][:end] if end <= LENGTH else [*ids[place], *[5] * (end - LENGTH)]
                rows.append(Row(every[place], computed[place], end - computed[place]))
                computed[place] = end
            output = runner.run(rows)
            for place, row in zip([p for p, row in zip(places, rows, strict=True) if row.samples], output, strict=True):
                found[place].append(row.float().clone())
    return {place: torch.stack(steps) for place, steps in found.items()}


# Grouped queries; transposed weights; joined products of both kinds; biases. And a datatype, and each kind of block.
USUAL = {"llama-float32", "gpt2-float32", "phi3-float32", "gpt_neox-float32", "opt-float32"}
USUAL |= {"llama-bfloat16", "llama-fp32", "llama-bf16", "qwen2-int8", "qwen3-int4", "gemma3-int8", "gpt2-int4"}
FORMS = {"float32": 1e-4, "bfloat16": 0.1, "fp32": 1e-4, "bf16": 0.05, "int8": 0.1, "int4": 0.9}
CASES = [
    (name, form)
    for name in PAGED
    for form in FORMS
    if form not in ("fp32", "bf16") or name in ("llama", "qwen2", "qwen3")
]


@pytest.mark.parametrize(
    ("architecture", "form"),
    [pytest.param(*case, marks=() if "-".join(case) in USUAL else pytest.mark.full) for case in CASES],
)
def test_rows_equal_merged_models_and_do_not_depend_on_their_neighbours(architecture, form, tmp_path):
    dtype = DTYPES.get(form)
    model = random_model(architecture)
    merged = {0: copy.deepcopy(model)}
    for number, targets in TARGETS.items():
        weights = save_random_adapter(tmp_path / str(number), model, "base", number, 3 + number, targets)
        merged[number] = merge(copy.deepcopy(model), weights)
    runner = runner_of(model.to(dtype or CACHES[form]), format_=None if dtype else form)
    alone = logits(runner, [0, 0, 0], places=[1])
    for number in TARGETS:
        runner.adapters.load(number, tmp_path / str(number))
    numbers = [1, 0, 2, 1, 3, 0]
    together = logits(runner, numbers)
    # Bit by bit: the base's row as before any adapter was loaded, and each row as it is without the others.
    assert torch.equal(together[1], alone[1])
    for place in (0, 2, 4, 5) if form != "bfloat16" else ():
        assert torch.equal(logits(runner, numbers, [place])[place], together[place])
    base = logits(runner, [0] * len(numbers))
    # GPT-Neo's scores have no scale, so that rounding weighs more.
    tolerance = FORMS[form] * (2 if architecture == "gpt_neo" else 1)
    for number, reference in merged.items():
        expected = logits(runner_of(reference), [0] * len(numbers))
        for place in (place for place, own in enumerate(numbers) if own == number):
            got, wanted = together[place], expected[place]
            assert (got - wanted).norm() <= tolerance * wanted.norm()
            assert number == 0 or (got - base[place]).norm() > 0.1 * base[place].norm()


def test_unloaded_adapters_leave_nothing(tmp_path):
    model = random_model("gpt2")
    save_random_adapter(tmp_path, model, "base")
    runner = runner_of(model)
    for number in range(1, 4):
        runner.adapters.load(number, tmp_path)
        adapter = weakref.ref(runner.adapters.get(number))
        logits(runner, [number, 0])
        runner.adapters.unload(number)
        gc.collect()
        assert adapter() is None
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert max(hooks) == 1


async def test_an_answer_ends_at_the_end_token_of_its_own_adapter(tmp_path):
    model = random_model("llama")
    save_random_adapter(tmp_path, model, "base")
    with random_engines() as make:
        engine = make(model)
        submissions = [request(str(number), PROMPTS[5], 12, min_tokens=0) for number in range(4)]
        for number in (1, 2):
            engine.adapters.load(number, tmp_path)
            submissions[number].adapter = number
            if number == 1:
                whole = await read_all(submit(engine, submissions[1]))
                (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[3], 10**6]}))
        submissions[3].adapter = 1
        ended, again = [await read_all(submit(engine, submissions[number])) for number in (2, 3)]
    assert len(whole) == 12
    assert ended == whole[: whole.index(whole[3]) + 1]
    assert again == whole


async def test_the_rules_of_an_answer_are_those_of_its_own_adapter_else_the_base_s(tmp_path):
    model = random_model("llama")
    merged = merge(copy.deepcopy(model), save_random_adapter(tmp_path, model, "base"))
    free = greedy(merged, PROMPTS[5], 12)
    merged.generation_config.suppress_tokens = free[:2]
    limited = greedy(merged, PROMPTS[5], 12)
    assert free != limited
    with random_engines() as make:
        engine = make(model)
        base_rules = GenerationRules(suppress_tokens=free[:2])
        for number, stated in enumerate([{}, {"suppress_tokens": free[:2]}, {"suppress_tokens": [3]}], 1):
            (tmp_path / "generation_config.json").write_text(json.dumps(stated))
            engine.adapters.load(number, tmp_path, base_rules)
        for number, wanted in enumerate([limited, limited, free], 1):
            submission = request(str(number), PROMPTS[5], 12)
            submission.adapter = number
            assert await read_all(submit(engine, submission)) == wanted


def test_recorded_passes_serve_the_steps_without_adapters_only(tmp_path):
    replayed = []

    def record(forward):
        return lambda: replayed.append(True) or forward()

    model = random_model("gemma")
    save_random_adapter(tmp_path, model, "base")
    runner = runner_of(model, operations=plain_kernels)
    with torch.inference_mode():
        runner.record(record, 4, 100)
    expected = logits(runner, [0, 0])
    assert replayed
    runner.adapters.load(1, tmp_path)
    replayed.clear()
    together = logits(runner, [1, 0])
    assert not replayed
    assert torch.equal(together[1], expected[1])
    assert torch.equal(logits(runner, [0, 0])[0], expected[0])
    assert replayed


def test_scales_follow_the_rank_its_root_and_patterns(tmp_path):
    model = random_model("llama")
    fields = {
        "lora_alpha": 6,
        # The first one backtracks for ever in Python's own expressions.
        "alpha_pattern": {r"((\w|\.)*)*!": 7, "layers.1.self_attn.q_proj": 3, "up_proj": 5},
        "ranks": {"v_proj": 9},
    }
    for name, use_root in {"plain": False, "root": True}.items():
        weights = save_random_adapter(tmp_path / name, model, "base", rank=4, use_rslora=use_root, **fields)
        scales = {}
        for path, (down, _) in weights.items():
            alpha = 5 if "up_proj" in path else 3 if "layers.1.self_attn.q_proj" in path else 6
            scales[path] = alpha / (len(down) ** 0.5 if use_root else len(down))
        runner = runner_of(copy.deepcopy(model))
        runner.adapters.load(1, tmp_path / name)
        got = logits(runner, [1])[0]
        wanted = logits(runner_of(merge(copy.deepcopy(model), weights, scales)), [0])[0]
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"task_type": "SEQ_CLS"}, "its task_type is SEQ_CLS"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"bias": "all"}, "it changes biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa changes the base"),
        ({"rank": 257}, "has rank 257; the maximum is 256"),
        ({"alpha_pattern": {"(?=q)q_proj": 3}}, "its alpha_pattern is not a regular expression that RE2 reads"),
        ({"alpha_pattern": {str(number): 1 for number in range(5000)}}, "has 5000 patterns; the maximum is 4096"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, fields, message):
    model = random_model("llama")
    save_random_adapter(tmp_path, model, "base", targets="q_proj", **fields)
    with pytest.raises(ValueError, match=message):
        Adapters(model).load(1, tmp_path)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "it changes lm_head, which is not"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 64), r"embed_tokens.lora_embedding_A is not that"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), "only one of two weights"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", (4, 64), "it changes model.layers.7"),
        ("base_model.model.model.layers.0.feed_forward.router.lora_A.weight", (4, 64), "router, which is not a linear"),
        # Reads the sampled positions only.
        ("base_model.model.cls.predictions.transform.dense.lora_A.weight", (4, 64), "transform.dense, which is not a"),
    ],
)
def test_weights_that_do_not_fit_the_base_are_refused(tmp_path, key, shape, message):
    model = random_model("llama4" if "router" in key else "bert" if "cls" in key else "llama")
    save_random_adapter(tmp_path, model, "base", targets="v_proj|dense")
    save_file({key: torch.zeros(shape)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        Adapters(model).load(1, tmp_path)


def test_an_adapter_of_another_size_is_refused_with_both_sizes(tmp_path):
    save_random_adapter(tmp_path, random_model("opt"), "base", targets="fc2")
    larger = hf.OPTForCausalLM(
        hf.OPTConfig(hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(ValueError, match=r"\[4, 128\] and \[64, 4\], but the base's layer has 256 inputs"):
        Adapters(larger).load(1, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"it has no adapter_model\.safetensors"):
        Adapters(larger).load(1, tmp_path)


def test_the_text_side_is_the_bases_except_for_what_the_adapters_folder_has(tmp_path):
    model = save_random_model("llama", tmp_path / "base")
    adapter = tmp_path / "adapter"
    save_random_adapter(adapter, model, "base")
    source, base_source = (ModelSource(path.name, str(path)) for path in (adapter, tmp_path / "base"))
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(BaseNeededError):
            read_text(source, pool)
        base = read_text(base_source, pool)
        assert read_text(source, pool, AdapterBase(base_source, base)) is base
        own = read_text(source, pool, AdapterBase(base_source))
        hello = [("user", "Hello")]
        assert chat_prompt(own.tokenizer, hello, 99) == chat_prompt(base.tokenizer, hello, 99)
        assert own.limits == base.limits
        (adapter / "chat_template.jinja").write_text("mine: {{ messages[0]['content'] }}")
        (adapter / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
        own = read_text(source, pool, AdapterBase(base_source, base))
        assert chat_prompt(own.tokenizer, hello, 99) == "mine: Hello"
        assert own.defaults.temperature == 0.25
        # A tokenizer of its own without a template.
        (adapter / "chat_template.jinja").unlink()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tmp_path / "base" / name, adapter / name)
        own = read_text(source, pool, AdapterBase(base_source, base))
        assert chat_prompt(own.tokenizer, hello, 99) == chat_prompt(base.tokenizer, hello, 99)
        # Templates within a configuration: of the base, then of the adapter.
        (tmp_path / "base" / "chat_template.jinja").unlink()
        for folder, prompt in ((tmp_path / "base", "base's: Hello"), (adapter, "mine: Hello")):
            template = prompt.replace("Hello", "{{ messages[0]['content'] }}")
            config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            for _ in range(2):  # Then without a tokenizer of its own.
                own = read_text(source, pool, AdapterBase(base_source))
                assert chat_prompt(own.tokenizer, hello, 99) == prompt
                (adapter / "tokenizer.json").unlink(missing_ok=True)
