"""The benchmarks' models: published architectures with random weights, created once.

`python -m bench.architectures FOLDER` creates those of a few million parameters, and `make` any.
Weights are bfloat16 and seeded, no model has an end token, and each has a tokenizer whose token n is the word `tn`:
some peers convert a model only together with a tokenizer.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
)

_SEED = 20
_SMALLER_EMBEDDINGS = 0.05
_SMALLER_ATTENTION = 0.1
_NO_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

_T5: Any = T5Config  # Its dataclass does not list all of its fields.

CONFIGS: dict[str, Any] = {
    # 10.5M parameters: 6.3M in the layers, 4.2M in the two embedding tables.
    "llama-10M": LlamaConfig(
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
    "OPT-125M": OPTConfig(
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
    "qwen3-0.6b": Qwen3Config(
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
    "llama-3.2-1b": LlamaConfig(
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


def make(name: str, folder: Path, tokenizer: Any = None, never: Sequence[int] = ()) -> None:
    """Writes a model's weights, configuration and tokenizer; by default that of the words `tn`.

    Greedy decoding never chooses the tokens of `never`, in a model that ties embeddings and head: theirs are zero.
    """
    torch.manual_seed(_SEED)
    config = (CONFIGS | SHAPES)[name]
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
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
    (tokenizer or _tokenizer(config.vocab_size, config.pad_token_id)).save_pretrained(folder)
    sys.stderr.write(f"{name}: {model.num_parameters() / 1e6:.1f}M parameters in {folder}\n")


def parameters(name: str) -> int:
    """The number of parameters; tied ones count once."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM
        return int(model.from_config((CONFIGS | SHAPES)[name]).num_parameters())


def _tokenizer(vocabulary_size: int, padding_id: int) -> Any:
    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(vocabulary_size)}, unk_token="t3"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    special = {"bos_token": "t2", "eos_token": "t2", "unk_token": "t3", "pad_token": f"t{padding_id}"}
    fast: Any = PreTrainedTokenizerFast
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
