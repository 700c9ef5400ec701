"""Small models with random weights, saved as transformers saves them, with the storyteller's tokenizer.

Weights are scaled up: tiny random models, tied ones above all, tend to repeat one token, and then
every comparison of outputs holds for the wrong reason.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from services.predictor.engine.runners.reach import find_reaches

ROOT = Path(__file__).parent.parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = 1536
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_IDS}

_GROUPED = {**_COMMON, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 24,
}
_INDEXED = {
    **_COMMON,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "max_position_embeddings": 256,
}
# Decoders that accept an attention function.
PAGED: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**_COMMON, word_embed_proj_dim=64, ffn_dim=128, max_position_embeddings=256)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, **_IDS)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=16)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_GROUPED, head_dim=16)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **_GROUPED,
            head_dim=16,
            sliding_window=12,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, head_dim=16, sliding_window=24)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GROUPED)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**_COMMON, intermediate_size=128, max_position_embeddings=256)
    ),
}
# Those of them whose keys depend on the length of the sequence, or whose layers reach less than all of it.
LIMITED: Mapping[str, Callable[[], Any]] = {
    # A window that only the mask has, and factors that change for all keys of a sequence.
    "phimoe": lambda: hf.PhimoeForCausalLM(
        hf.PhimoeConfig(
            **_GROUPED,
            head_dim=16,
            num_local_experts=4,
            sliding_window=20,
            rope_parameters={**_LONG, "short_mscale": 1.1, "long_mscale": 1.3},
        )
    ),
    "phi3_long": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**_GROUPED, original_max_position_embeddings=24, rope_parameters=dict(_LONG))
    ),
    # As `generate` computes it, earlier keys keep their factors.
    "llama_long": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED, rope_parameters=dict(_LONG))),
    "llama_dynamic": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **{**_GROUPED, "max_position_embeddings": 24},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
        )
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **_GROUPED,
            head_dim=16,
            intermediate_size_mlp=128,
            num_local_experts=2,
            attention_chunk_size=16,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            attn_temperature_tuning=False,
        )
    ),
}
# Those that are served one row at a time.
ONE_ROW: Mapping[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, tie_word_embeddings=False, **_IDS)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_GROUPED, head_dim=16, query_pre_attn_scalar=16)),
    # Its temperatures are those of a token's place in the row.
    "llama4_tuned": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **_GROUPED,
            head_dim=16,
            intermediate_size_mlp=128,
            num_local_experts=2,
            attention_chunk_size=16,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            floor_scale=16,
            attn_scale=0.5,
        )
    ),
    "doge": lambda: hf.DogeForCausalLM(hf.DogeConfig(**_GROUPED, keep_window_size=12)),
    "deepseek_v32": lambda: hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**_INDEXED)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8, **_IDS)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=256,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
            **_IDS,
        )
    ),
    # Its decoder has a window, which cross-attention has not.
    "t5gemma": lambda: hf.T5GemmaForConditionalGeneration(
        hf.T5GemmaConfig(
            **{
                side: hf.T5GemmaModuleConfig(
                    **_GROUPED,
                    head_dim=16,
                    query_pre_attn_scalar=16,
                    sliding_window=12,
                    layer_types=["sliding_attention", "full_attention"],
                )
                for side in ("encoder", "decoder")
            },
            vocab_size=VOCABULARY,
            **_IDS,
        )
    ),
}
RAGGED: Mapping[str, Callable[[], Any]] = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "flan": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
}
ARCHITECTURES: Mapping[str, Callable[[], Any]] = {**PAGED, **LIMITED, **ONE_ROW, **RAGGED}


def random_model(architecture: str, seed: int = 0) -> Any:
    """A model of that architecture in float32."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "A_log" not in name:
                scale = 20 if "relative" in name else 4 if architecture == "bart" and "attn" in name else 1.5
                if "embed_tokens" in name and "gemma" in architecture:
                    scale /= 64**0.5  # Gemma multiplies its embeddings by the root of their size.
                parameter.normal_(0, scale / parameter.shape[1] ** 0.5)
    model.generation_config.eos_token_id = 2
    if architecture in PAGED or architecture in LIMITED:
        find_reaches(model, 256)
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
