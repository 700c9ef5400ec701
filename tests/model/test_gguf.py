"""GGUF files: their weights are those that the file has, computed as they are where that is possible."""

import json
import threading

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headrace.errors import StartupError
from headrace.models.gguf.folder import gguf_folder
from headrace.models.gguf.reader import read_gguf
from headrace.models.gguf.vocabulary import Vocabulary
from headrace_predictor.engine.cpu.grouped import KINDS
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.models.gguf_weights import KINDS_OF, read_state, unpack
from headrace_predictor.models.weights import prepare_torch
from headrace_predictor.settings import PredictorSettings
from tests.gguf_files import QUANTISED, write_gguf
from tests.model.random_crowd import PROMPTS, read_all, request
from tests.model.test_streamed import last_logits
from tests.support.in_process_engine import submit

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1600,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 64}
_EXPERTS = {"num_experts_per_tok": 2, **_HEADS}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
_YARN_FILE = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 128,
}
CONFIGS = {
    "llama": ("Llama", {**_HEADS, "tie_word_embeddings": False}, {}),
    "llama with biases": ("Llama", {**_HEADS, "attention_bias": True}, {}),
    "llama, yarn": ("Llama", {**_HEADS, "rope_parameters": _YARN}, _YARN_FILE),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {**_HEADS, "tie_word_embeddings": True}, {}),
    "gemma2": ("Gemma2", {**_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 64}, {}),
    "gemma3": ("Gemma3Text", {**_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 7}, {}),
    "gemma2, other layers": (
        "Gemma2",
        {
            **_HEADS,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {"attention__sliding_window_pattern": 3},
    ),
    "gemma3, other layers": (
        "Gemma3Text",
        {
            **_HEADS,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"attention__sliding_window_pattern": [False, True, False]},
    ),
    "gemma3, no window": (
        "Gemma3Text",
        {**_HEADS, "sliding_window": 0, "query_pre_attn_scalar": 64, "layer_types": ["full_attention"] * 3},
        {},
    ),
    "phi3": ("Phi3", {}, {}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        {},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}, {}),
    "mixtral": ("Mixtral", {**_EXPERTS, "num_local_experts": 4}, {}),
    "qwen3 mixture": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True},
        {},
    ),
}
_IDS = [(7 * i * i + 3 * i) % 1500 + 6 for i in range(60)]
# Of the logits, as a part of their norm: inputs of 8 bits.
_ERROR = 0.05
_STREAMED = ("llama", "llama with biases", "llama, yarn", "qwen2", "qwen3")


def random_model(name):
    """A float32 model whose norms are no ones, and its metadata for a file."""
    kind, own, stated = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    return model, stated


def loaded(path, **settings):
    own = PredictorSettings(weights_cache=path.parent / "cache", threads=2, **settings)
    return load_generation("model", gguf_folder(path), True, own, prepare_torch(own))


def last_of(generation, ids=_IDS, ends=(60,)):
    return last_logits(generation.engine._runner, ids, list(ends))


@pytest.mark.parametrize(
    ("name", "types"),
    [
        *((name, "F32") for name in CONFIGS),
        *(
            pytest.param(name, "Q8_0", marks=() if name in ("llama, yarn", "mixtral") else pytest.mark.full)
            for name in CONFIGS
        ),
    ],
)
def test_logits_are_those_of_transformers(name, types, tmp_path):
    model, stated = random_model(name)
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", model, types, **stated)
        expected = model(torch.tensor([_IDS])).logits[0, -1]
    generation = loaded(tmp_path / "model.gguf", dtype="fp32")
    try:
        (found,) = last_of(generation)
    finally:
        generation.engine.close()
    streams = generation.engine.description["weights"] == "q8_0"
    assert streams == (types == "Q8_0" and name in _STREAMED)
    assert (found - expected).norm() <= (_ERROR if streams else 1e-5) * expected.norm()


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_have_the_numbers_of_gguf(kind):
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = np.random.default_rng(0).integers(0, 256, (8, 1024 // numbers, size), dtype=np.uint8)
    half = np.float16([1.5, -0.25]).view(np.uint8)
    rows[:, :, -2:] = half[:2]
    rows[:, :, :4] = half
    rows = rows.reshape(8, -1)
    found = unpack(kind, rows)
    assert np.array_equal(found.values(), gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    assert found.scales.shape[1] == 1024 // 32 * KINDS[KINDS_OF[kind]].scales
    assert bool(found.minimums.size) == KINDS[KINDS_OF[kind]].has_minimum


@pytest.mark.parametrize(
    "types",
    [
        {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q6_K"},
        {"": "Q4_0", "gate_proj": "Q5_0", "up_proj": "Q5_1", "o_proj": "Q4_1", "embed_tokens": "Q8_0"},
    ],
)
async def test_mixed_blocks_are_computed_as_they_are_and_equally_in_any_batch(types, tmp_path):
    model, _ = random_model("qwen3")
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", model, types)
        expected = model(torch.tensor([_IDS])).logits[0, -1]
    generation = loaded(tmp_path / "model.gguf", dtype="fp32")
    assert generation.engine.description["weights"] == "+".join(sorted({kind.lower() for kind in types.values()}))
    try:
        (found,) = last_of(generation)
        assert (found - expected).norm() <= _ERROR * expected.norm()
        for ends in ([7, 8, 9, 33, 59, 60], [5, 60]):
            assert torch.equal(last_of(generation, ends=ends)[-1], found)
        alone = [await read_all(submit(generation.engine, request(str(i), p, 12))) for i, p in enumerate(PROMPTS)]
        together = [submit(generation.engine, request(f"again {i}", p, 12)) for i, p in enumerate(PROMPTS)]
        assert [await read_all(one) for one in together] == alone
    finally:
        generation.engine.close()


async def test_a_file_and_weights_that_are_quantised_by_its_rule_give_the_same(tmp_path):
    model, _ = random_model("qwen3")
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((gguf_folder(tmp_path / "model.gguf") / name).read_bytes())
    of_file = loaded(tmp_path / "model.gguf", dtype="fp32")
    own = PredictorSettings(weights_cache=tmp_path / "cache", threads=1, dtype="fp32", weights="q8_0")
    of_folder = load_generation("model", folder, True, own, prepare_torch(own))
    try:
        answers = []
        for generation in (of_file, of_folder):
            assert generation.engine.description["weights"] == "q8_0"
            answers.append([await read_all(submit(generation.engine, request(str(p), p, 24))) for p in PROMPTS])
            answers[-1].append(last_of(generation)[0].tolist())
        assert answers[0] == answers[1]
    finally:
        of_file.engine.close()
        of_folder.engine.close()


def test_a_model_in_parts_is_read_by_any_of_them(tmp_path):
    model, _ = random_model("llama")
    write_gguf(tmp_path / "whole.gguf", model, "Q8_0", parts=12)
    parts = sorted(tmp_path.glob("whole-*.gguf"))
    assert len(parts) > 1
    # As the hub's cache has them: links to names that say nothing.
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, part in enumerate(parts):
        (snapshot / part.name).symlink_to(part.rename(tmp_path / f"blob{number}"))
    with torch.no_grad():
        expected = model(torch.tensor([_IDS])).logits[0, -1]
    for part in (parts[0], parts[-1]):
        generation = loaded(snapshot / part.name, dtype="fp32")
        try:
            (found,) = last_of(generation)
        finally:
            generation.engine.close()
        assert (found - expected).norm() <= _ERROR * expected.norm()


def test_packed_weights_of_a_file_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace_predictor.engine.runners.streamed._LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr("headrace_predictor.engine.cpu.packed_file._has_huge_pages", lambda memory: True)
    model, _ = random_model("qwen3")
    write_gguf(tmp_path / "model.gguf", model, "Q4_0")
    logits = []
    for mapped in (False, True):
        generation = loaded(tmp_path / "model.gguf", dtype="fp32")
        logits.append(last_of(generation)[0])
        assert mapped is False or int(generation.engine.description["mapped_bytes"]) > 0
        for thread in threading.enumerate():
            if thread.name == "keep-weights":
                thread.join(30)
        generation.engine.close()
    assert torch.equal(*logits)


@pytest.mark.parametrize("lie", ["embedding_length", "feed_forward_length", "attention.head_count", "block_count"])
def test_sizes_that_the_tensors_do_not_have_are_refused(lie, tmp_path):
    model, _ = random_model("llama")
    write_gguf(tmp_path / "model.gguf", model)
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    at = data.index(f"llama.{lie}".encode()) + len(f"llama.{lie}") + 4
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.gguf"):
        gguf_folder(tmp_path / "model.gguf")


def test_a_size_of_zero_is_refused(tmp_path):
    model, _ = random_model("phi3")
    write_gguf(tmp_path / "model.gguf", model, attention__head_count=0)
    with pytest.raises(ValueError, match=r"model\.gguf: no sizes of heads follow"):
        gguf_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            {"rope_type": "yarn", "original_max_position_embeddings": 512},
        ),
        (_YARN_FILE | {"rope__scaling__yarn_beta_fast": 16.0}, {"rope_type": "yarn", "beta_fast": 16.0}),
    ],
)
def test_scalings_are_those_of_the_file(stated, expected, tmp_path):
    model, _ = random_model("llama")
    write_gguf(tmp_path / "model.gguf", model, **stated)
    config = json.loads((gguf_folder(tmp_path / "model.gguf") / "config.json").read_text())
    assert config["rope_parameters"] == config["rope_parameters"] | expected


@pytest.mark.parametrize(("stated", "expected"), [({}, 1.0), ({"rope__scaling__attn_factor": 1.25}, 1.25)])
def test_attention_of_longrope_has_the_factor_of_the_file_only(stated, expected, tmp_path, monkeypatch):
    write = gguf.GGUFWriter.write_header_to_file

    def write_more(writer, *arguments):
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.linspace(1, 9, 32, dtype=np.float32))
        write(writer, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write_more)
    write_gguf(tmp_path / "model.gguf", random_model("phi3")[0], rope__scaling__original_context_length=128, **stated)
    config = json.loads((gguf_folder(tmp_path / "model.gguf") / "config.json").read_text())
    assert config["rope_parameters"]["attention_factor"] == expected


def test_queries_of_no_whole_heads_are_refused_by_file_and_tensor(tmp_path):
    model, _ = random_model("llama")
    write_gguf(tmp_path / "model.gguf", model)
    model.config.num_attention_heads = 7
    with pytest.raises(ValueError, match=r"model\.gguf has tensor blk\.0\.attn_q\.weight of \d+ rows, .+ not 7 heads"):
        read_state(read_gguf(tmp_path / "model.gguf"), model.config, torch.float32)


def test_a_head_that_is_rotated_in_part_is_refused(tmp_path):
    model, _ = random_model("llama")
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ValueError, match="rotates 32 of 64 numbers"):
        gguf_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "stated", "reason"),
    [
        ("qwen3", {"pooling_type": 3}, "embeddings"),
        ("llama", {"attention__causal": False}, "embeddings"),
        ("granite", {"rope__scaling__finetuned": False}, "without positions"),
        ("llama", {"rope__scaling__attn_factor": 0.7}, "two rules"),
        ("gemma2", {"rope__freq_base_swa": 1000.0}, "rotates otherwise within windows"),
    ],
)
def test_what_no_class_computes_is_refused(name, stated, reason, tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(name)[0], **stated)
    with pytest.raises(ValueError, match=reason):
        gguf_folder(tmp_path / "model.gguf")


def test_a_scale_of_zero_is_the_usual_one(tmp_path):
    model, _ = random_model("granite")
    model.config.attention_multiplier = model.config.residual_multiplier = 0.0
    write_gguf(tmp_path / "model.gguf", model)
    config = json.loads((gguf_folder(tmp_path / "model.gguf") / "config.json").read_text())
    assert (config["attention_multiplier"], config["residual_multiplier"]) == (0.125, 1.0)


def vocabulary_of(path, tokens, types, **ids):
    """Of a file that has SentencePiece's tokens only, with the scores of their order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([float(-index) for index in range(len(tokens))])
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Vocabulary(read_gguf(path))


def test_pieces_of_any_type_give_the_ids_of_llama_cpp(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "\u2581\u2581", "\u2581\u2581a", "aa", "<|im_end|>", "<fim_pad>", "<pad>"]
    # Bytes as in files without types; `aa` is unused; the turn's end is typed as a text.
    types = [2, 3, 3, *[1] * 256, 1, 1, 1, 4, 5, 1, 3, 3]
    vocabulary = vocabulary_of(tmp_path / "model.gguf", tokens, types, fim_sep=266)
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer())
    assert tokenizer.encode("a\n<|im_end|>aa").ids == [1, 259, 260, 13, 264, 259, 263]
    assert tokenizer.encode("   a a").ids == [1, 261, 262, 259, 260]
    assert vocabulary.end_ids == [2, 264, 265, 266]


def test_sampling_is_that_of_the_file(tmp_path, monkeypatch):
    write = gguf.GGUFWriter.write_header_to_file

    def write_more(writer, *arguments):
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_penalty_repeat(1.1)
        writer.add_array("tokenizer.ggml.suppress_tokens", [7, 9])
        write(writer, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write_more)
    write_gguf(tmp_path / "model.gguf", random_model("llama")[0])
    stated = json.loads((gguf_folder(tmp_path / "model.gguf") / "generation_config.json").read_text())
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "suppress_tokens": [7, 9]}
    assert stated == stated | expected


def test_pieces_without_named_tokens_begin_and_end_as_sentencepiece_has_them(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "\u2581", "a"])
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    vocabulary = Vocabulary(read_gguf(tmp_path / "model.gguf"))
    assert Tokenizer.from_str(vocabulary.tokenizer()).encode("a").ids == [1, 3, 4]
    assert vocabulary.end_ids == [2]


def test_a_token_of_megabytes_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "x" * (2 << 20)])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ValueError, match="tokens are too long"):
        gguf_folder(tmp_path / "model.gguf")


def test_a_tensor_that_is_not_known_is_refused_by_name(tmp_path):
    model, _ = random_model("llama")
    model.model.layers[0].mlp.gate_proj.bias = torch.nn.Parameter(torch.ones(768))
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(StartupError, match=r"lacks model\.layers"):
        loaded(tmp_path / "model.gguf").engine.close()
