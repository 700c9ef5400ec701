"""The benchmarks' models: published architectures with random weights, created once.

`python -m bench.architectures FOLDER` creates those of a few million parameters, and `make` any.
Weights are bfloat16 and seeded, no model has an end token, and each has a tokenizer whose token n is the word `tn`:
some peers convert a model only together with a tokenizer.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

_SEED = 20
_SMALLER_EMBEDDINGS = 0.05
_SMALLER_ATTENTION = 0.1
_NO_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

_T5: Any = hf.T5Config  # Its dataclass does not list all of its fields.

CONFIGS: dict[str, Any] = {
    # 10.5M parameters: 6.3M in the layers, 4.2M in the two embedding tables.
    "llama-10M": hf.LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=0,
        **_NO_END,
    ),
    # facebook/opt-125m
    "OPT-125M": hf.OPTConfig(
        vocab_size=50272,
        hidden_size=768,
        word_embed_proj_dim=768,
        ffn_dim=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=2048,
        dropout=0.0,
        pad_token_id=1,
        **_NO_END,
    ),
    # google-t5/t5-small
    "T5-small": _T5(
        vocab_size=32128,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        decoder_start_token_id=0,
        pad_token_id=0,
        **_NO_END,
    ),
}

# Models of the size that people serve; their tokenizers are not made here.
SHAPES: dict[str, Any] = {
    "qwen3-0.6b": hf.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        pad_token_id=None,
        **_NO_END,
    ),
    "llama-3.2-1b": hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        pad_token_id=None,
        **_NO_END,
    ),
}

_COMMON: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "max_position_embeddings": 2048,
    **_NO_END,
    "pad_token_id": None,
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {"num_experts_per_tok": 4, "n_routed_experts": 16, "num_local_experts": 16}
_DELTA = {
    "num_hidden_layers": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_state": 128}
_BART: dict[str, Any] = {
    "vocab_size": 16384,
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "max_position_embeddings": 512,
}
# Published architectures in shapes of 50 to 100 million parameters.
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma-2": partial(hf.Gemma2Config, **_COMMON, **_HEADS, num_hidden_layers=12, intermediate_size=2048),
    "gpt-oss": partial(hf.GptOssConfig, **_COMMON, **_HEADS, **_EXPERTS, num_hidden_layers=8, intermediate_size=384),
    "deepseek-v3": partial(
        hf.DeepseekV3Config,
        **_COMMON,
        **_EXPERTS,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1536,
        moe_intermediate_size=256,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # Peers read it; the published configuration has it.
        scoring_func="sigmoid",
    ),
    "qwen3.5": partial(hf.Qwen3_5TextConfig, **_COMMON, **_HEADS, **_DELTA, intermediate_size=2048),
    "qwen3-next": partial(
        hf.Qwen3NextConfig,
        **_COMMON,
        **_HEADS,
        **_DELTA,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
    ),
    "granite-4": partial(
        hf.GraniteMoeHybridConfig,
        **_COMMON,
        **_MAMBA,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=0,
        shared_intermediate_size=2048,
        layer_types=(["mamba"] * 5 + ["attention"]) * 2,
    ),
    "falcon-h1": partial(
        hf.FalconH1Config,
        **_COMMON,
        **_HEADS,
        **_MAMBA,
        num_hidden_layers=12,
        mamba_d_ssm=1024,
        intermediate_size=1536,
    ),
    "bloom": partial(
        hf.BloomConfig, vocab_size=16384, hidden_size=512, n_layer=14, n_head=8, pad_token_id=None, **_NO_END
    ),
    "bart": partial(hf.BartConfig, **_BART),
    "nllb": partial(hf.M2M100Config, **_BART),
}


def config_of(name: str) -> Any:
    """The configuration of a model of this module."""
    return FAMILIES[name]() if name in FAMILIES else (CONFIGS | SHAPES)[name]


def untrained(name: str, dtype: torch.dtype) -> Any:
    """A model with random weights."""
    config = config_of(name)
    auto: Any = hf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hf.AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype)


def make(name: str, folder: Path, tokenizer: Any = None, never: Sequence[int] = ()) -> None:
    """Writes a model's weights, configuration and tokenizer; by default that of the words `tn`.

    Greedy decoding never chooses the tokens of `never`, in a model that ties embeddings and head: theirs are zero.
    """
    torch.manual_seed(_SEED)
    model = untrained(name, torch.bfloat16)
    config = model.config
    with torch.no_grad():
        model.get_input_embeddings().weight[list(never)] = 0
        # At their own scale, attention's mean over the context soon makes an answer one token that repeats.
        for layer in model.model.layers if name in SHAPES else ():
            layer.self_attn.o_proj.weight.mul_(_SMALLER_ATTENTION)
    if config.is_encoder_decoder:
        # At T5's own scale the embedding of the last id dominates all layers, and every output repeats that id.
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(_SMALLER_EMBEDDINGS)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (tokenizer or _tokenizer(config.vocab_size, config.pad_token_id or 0)).save_pretrained(folder)
    sys.stderr.write(f"{name}: {model.num_parameters() / 1e6:.1f}M parameters in {folder}\n")


def parameters(name: str) -> int:
    """The number of parameters; tied ones count once."""
    with torch.device("meta"):
        return int(untrained(name, torch.bfloat16).num_parameters())


def _tokenizer(vocabulary_size: int, padding_id: int) -> Any:
    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(vocabulary_size)}, unk_token="t3"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    special = {"bos_token": "t2", "eos_token": "t2", "unk_token": "t3", "pad_token": f"t{padding_id}"}
    fast: Any = hf.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, **special)


def make_missing(folder: Path) -> None:
    """Creates missing models; a folder appears under its name only when it is complete."""
    for name in CONFIGS:
        if not (folder / name).is_dir():
            unfinished = folder / f"{name}.unfinished"
            make(name, unfinished)
            unfinished.rename(folder / name)


if __name__ == "__main__":
    make_missing(Path(sys.argv[1]))
