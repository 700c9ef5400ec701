"""Small encoders with random weights, saved as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

VOCABULARY = 120
LABELS = {0: "sad", 1: "neutral", 2: "glad"}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "id2label": LABELS,
}

ENCODERS: Mapping[str, Callable[[], Any]] = {
    "bert-classifier": lambda: BertForSequenceClassification(BertConfig(**_COMMON)),
    "cross-encoder": lambda: BertForSequenceClassification(BertConfig(**_COMMON | {"id2label": {0: "LABEL_0"}})),
    "llama-classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**_COMMON, pad_token_id=0)),
    "llama-classifier-without-padding": lambda: LlamaForSequenceClassification(LlamaConfig(**_COMMON)),
    "bert": lambda: BertModel(BertConfig(**_COMMON)),
    "roberta": lambda: RobertaModel(RobertaConfig(**_COMMON)),
    "t5-encoder": lambda: T5EncoderModel(
        T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
}

# Further types of models, for comparisons with sentence-transformers.
TYPES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "mpnet": {"pad_token_id": 0},
    "xlm-roberta": {"pad_token_id": 0},
    "modernbert": {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2},
    # Reads the embedding of the padding behind a text, if that is not zero.
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32, "pad_token_id": 0},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
        "sliding_window": 8,
        "use_bidirectional_attention": True,
    },
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "bart": {
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 3,
    },
}


def save_random_type(kind: str, folder: Path, auto: Any = AutoModel, **more: Any) -> Any:
    """As `save_random_encoder`, for a type of TYPES and one of transformers' Auto classes."""
    # The id that ends a text in `save_words_tokenizer`.
    specials = {"eos_token_id": 3, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 3}
    config = AutoConfig.for_model(kind, **{**_COMMON, **specials, **TYPES[kind], **more})
    torch.manual_seed(0)
    return _save_random(auto.from_config(config), folder)


def save_random_encoder(kind: str, folder: Path) -> Any:
    """Makes a model, saves it, and returns it in float32; weights are large enough for answers to differ."""
    torch.manual_seed(0)
    return _save_random(ENCODERS[kind](), folder)


def _save_random(model: Any, folder: Path) -> Any:
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


def save_pooling(folder: Path, pooling: Mapping[str, Any], *more: str) -> None:
    """Adds the files of sentence-transformers: the configuration of a pooling, and further modules by class name."""
    package = "sentence_transformers.models"
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"{i}_{name}", name) for i, name in enumerate(more, 2))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{name}"} for i, (path, name) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def save_words_tokenizer(folder: Path, *words: str) -> Any:
    """Adds a tokenizer of these words, with BERT's special tokens around each text, and returns it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    return fast
