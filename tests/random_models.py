"""Small models with random weights, saved as transformers saves them, with the storyteller's tokenizer.

Weights are scaled up: tiny random models, tied ones above all, tend to repeat one token, and then
every comparison of outputs holds for the wrong reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

ROOT = Path(__file__).parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 1536
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_IDS}

ARCHITECTURES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**_COMMON, intermediate_size=128, num_key_value_heads=2, max_position_embeddings=256)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**_COMMON, word_embed_proj_dim=64, ffn_dim=128, max_position_embeddings=256)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_COMMON, intermediate_size=128, num_key_value_heads=2, head_dim=16, max_position_embeddings=256)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, **_IDS)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    ),
}


def save_random_model(architecture: str, folder: Path, seed: int = 0) -> Any:
    """Makes a model of that architecture, saves it with a tokenizer, and returns it in float32."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, (20 if "relative" in name else 1.5) / parameter.shape[1] ** 0.5)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (source := ROOT / "models" / "storyteller" / name).is_file():
            shutil.copy(source, folder / name)
    return model
