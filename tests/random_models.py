"""Families of the zoo by short names, saved as transformers saves them, with the storyteller's tokenizer."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace_predictor.engine.runners.own_attention import page_own_attention
from headrace_predictor.engine.runners.reach import find_reaches
from tests.zoo import FAMILIES

ROOT = Path(__file__).parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Decoders that accept an attention function, as families of the zoo; the last ones by own_attention.py.
PAGED = {
    "llama": "Llama 2",
    "opt": "OPT",
    "gpt2": "GPT-2",
    "qwen2": "Qwen 2, Qwen 2.5",
    "qwen3": "Qwen 3",
    "gemma": "Gemma",
    "gemma3": "Gemma 3, text",
    "mistral": "Mistral",
    "phi3": "Phi 3, Phi 4",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gemma2": "Gemma 2",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "falcon": "Falcon",
    "falcon_7b": "Falcon 7B",
    "falcon_rw": "Falcon RW",
    "gptj": "GPT-J",
    "gpt_neo": "GPT-Neo",
    "codegen": "CodeGen",
}
# Those of them whose keys depend on the length of the sequence, or whose layers reach less than all of it.
LIMITED = {
    "phimoe": "Phi 3.5 MoE",
    "phi3_long": "Phi 3, Phi 4 mini: LongRoPE",
    "llama_long": "Llama, LongRoPE",
    "llama_dynamic": "Llama, dynamic scaling",
    "llama4": "Llama 4, text, untuned",
}
# Those of other runners, those that ask a cache for positions, and those whose rows are equal except for rounding.
OTHERS = {
    "gpt_oss": "GPT-OSS",
    "deepseek_v3": "DeepSeek V3, R1, Kimi K2",
    "gemma4": "Gemma 4, text",
    "llama4_tuned": "Llama 4, text",
    "doge": "Doge",
    "deepseek_v32": "DeepSeek V3.2",
    "mamba": "Mamba",
    "bart": "BART",
    "mbart": "mBART",
    "m2m": "M2M, NLLB",
    "marian": "Marian",
    "t5gemma": "T5Gemma",
    "bert": "BERT as a decoder",
}
ARCHITECTURES = PAGED | LIMITED | OTHERS | {"t5": "T5", "flan": "FLAN-T5"}
_FAMILIES = {family.name: family for family in FAMILIES}


def initialised_model(architecture: str, seed: int = 0) -> Any:
    """A model of that architecture in float32, as transformers initialises it."""
    return _FAMILIES[ARCHITECTURES[architecture]].initialised(seed)


def random_model(architecture: str, seed: int = 0) -> Any:
    """A model of that architecture in float32."""
    model = _FAMILIES[ARCHITECTURES[architecture]].model(seed)
    if architecture in PAGED | LIMITED:
        _ = page_own_attention(model, 256) or find_reaches(model, 256)
    return model


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The ids from transformers' `generate`, the oracle."""
    ids = torch.tensor([prompt])
    if any("dynamic" in str(getattr(module, "rope_type", "")) for module in model.modules()):
        model = copy.deepcopy(model)  # It remembers the longest sequence.
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, do_sample=False
    )
    ids_out: list[int] = generated[0, -length:].tolist()
    return ids_out


def save_random_model(architecture: str, folder: Path, seed: int = 0) -> Any:
    """Makes a random model, saves it with a tokenizer, and returns it."""
    model = random_model(architecture, seed)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (source := ROOT / "models" / "storyteller" / name).is_file():
            shutil.copy(source, folder / name)
    return model


def save_portable_model(folder: Path) -> None:
    """Saves a Qwen 3 with a tokenizer; its weights are the same on every machine, torch's random numbers are not."""
    model = initialised_model("qwen3")
    generator = np.random.Generator(np.random.PCG64(0))
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.from_numpy(generator.integers(-127, 128, tuple(parameter.shape), np.int8))
            parameter.copy_(whole / 256 if parameter.dim() == 2 else 1 + whole / 256)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(ROOT / "models" / "storyteller" / name, folder / name)
