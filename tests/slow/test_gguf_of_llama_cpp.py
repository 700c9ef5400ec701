"""GGUF files of llama.cpp's own tools: its conversion script and `llama-quantize`, of random models.

LLAMA_CPP is the folder of its source, LLAMA_BIN that of its programs; its vocabularies are in the source.
"""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer

from headrace.models.gguf.folder import gguf_folder
from headrace.models.gguf.reader import read_gguf
from headrace.models.gguf.vocabulary import Vocabulary
from headrace_predictor.engine.runners.unread import read_weights
from headrace_predictor.generation.loading import _auto_class
from headrace_predictor.models.weights import load_weights
from tests.gguf_files import converted, named_tensors
from tests.model.test_gguf import _IDS, last_of, loaded, random_model
from tests.random_models import ROOT

SOURCE, PROGRAMS = Path(os.environ.get("LLAMA_CPP", "missing")), Path(os.environ.get("LLAMA_BIN", "missing"))
pytestmark = pytest.mark.skipif(
    not (SOURCE / "convert_hf_to_gguf.py").is_file() or not (PROGRAMS / "llama-quantize").is_file(),
    reason="LLAMA_CPP and LLAMA_BIN name no llama.cpp",
)
MODELS = ("llama", "qwen3", "gemma3", "phi3", "granite", "smollm3", "mixtral")
FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K")
_ERROR = 0.05


@pytest.fixture(scope="module")
def converted_file(tmp_path_factory):
    """Makes the file of a model in F32, once."""
    folder, made = tmp_path_factory.mktemp("llama.cpp"), {}
    text = (ROOT / "docs" / "models.md").read_text()
    (folder / "text").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokens"), vocab_size=1200, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip

    def make(name):
        if name not in made:
            model, _ = random_model(name)
            own = folder / name
            model.save_pretrained(own)
            (own / "tokenizer.model").write_bytes((folder / "tokens.model").read_bytes())
            path = folder / f"{name}-F32.gguf"
            command = (sys.executable, str(SOURCE / "convert_hf_to_gguf.py"), str(own), "--outtype", "f32")
            subprocess.run([*command, "--outfile", str(path)], check=True, capture_output=True, timeout=300)
            made[name] = model, path
        return made[name]

    return make


def reference(model, path):
    """The logits of a model with the numbers that the package `gguf` reads."""
    with torch.no_grad():
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for _, part, written in named_tensors(model):
            tensor = tensors[written]
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            assert part.shape == values.shape
            part.copy_(torch.from_numpy(converted(written, values, model.config, back=True)))
        return model(torch.tensor([_IDS])).logits[0, -1]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_files_numbers(name, format_, converted_file, tmp_path):
    model, whole = converted_file(name)
    path = tmp_path / "model.gguf"
    subprocess.run(
        [str(PROGRAMS / "llama-quantize"), str(whole), str(path), format_], check=True, capture_output=True, timeout=300
    )
    expected = reference(model, path)
    folder = gguf_folder(path)
    plain = load_weights(name, folder, _auto_class(name, folder), "fp32", torch.device("cpu"))
    read_weights(plain)
    with torch.no_grad():
        found = plain(torch.tensor([_IDS])).logits[0, -1]
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    generation = loaded(path, dtype="fp32")
    try:
        (computed,) = last_of(generation)
    finally:
        generation.engine.close()
    assert (computed - expected).norm() <= _ERROR * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_of_a_file_in_float32_are_those_of_transformers(name, converted_file):
    _, path = converted_file(name)
    model, _ = random_model(name)
    prompt = torch.tensor([_IDS[:20]])
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )[0, 20:].tolist()
    generation, ids = loaded(path, dtype="fp32"), _IDS[:20]
    try:
        for _ in expected:
            ids = [*ids, int(last_of(generation, ids, (len(ids),))[0].argmax())]
    finally:
        generation.engine.close()
    assert ids[20:] == expected


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.gguf.inp")), ids=lambda path: path.name)
def test_vocabularies_give_the_known_ids(path):
    file = read_gguf(path.with_suffix(""))
    if file.metadata["tokenizer.ggml.model"] not in ("gpt2", "llama"):
        pytest.skip("of an architecture that is not served")
    tokenizer = Tokenizer.from_str(Vocabulary(file).tokenizer())
    texts = path.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    answers = path.with_suffix(".out").read_text().splitlines()
    assert len(answers) >= 40
    for text, answer in zip(texts, answers, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(number) for number in answer.split()]
