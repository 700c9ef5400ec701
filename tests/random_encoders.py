"""Small encoders with random weights, saved as transformers and sentence-transformers save them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

TEXTS = [
    "the fox sat on a mat",
    "a bird",
    "the bird sat on the fox on a mat on the bird sat a fox",
    "mat",
    "on the mat sat a bird on a fox and more",
]
# What tokenizers of TEXTS know.
WORDS = ["the", "fox", "sat", "on", "a", "mat", "bird", "query", ":", "document", "task"]


@dataclass(frozen=True)
class Encoder:
    """A family whose vectors, scores as a classifier and scores as a generator are those of sentence-transformers.

    Each is True, False where there are no such models, or a part of the refusal's text. `dense`: linear layers behind
    the pooling.
    """

    name: str
    model_type: str
    given: Mapping[str, Any] = field(default_factory=dict)
    vectors: bool | str = True
    scores: bool | str = True
    logits: bool | str = False
    dense: int = 0


_PADDED = {"pad_token_id": 0}
_GROUPED = {**_PADDED, "num_key_value_heads": 2, "head_dim": 8}
_EMBEDDING = {**_PADDED, "embedding_size": 16}
_LAYERS = {**_PADDED, "n_layer": 2, "n_head": 4}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {
    **_PADDED,
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 3,
}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# Reads the embedding of the padding behind a text, if that is not zero.
_MOBILE = {**_PADDED, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32}
_WINDOWS = {**_GROUPED, "sliding_window": 8}
_SPARSE = "after a short text transformers leaves block-sparse attention"

# fmt: off
FAMILIES = (
    Encoder("BERT, BGE, E5, MiniLM", "bert"),
    Encoder("LaBSE", "bert", scores=False, dense=1),
    Encoder("RoBERTa", "roberta", _PADDED),
    Encoder("XLM-R, BGE-M3, multilingual E5", "xlm-roberta", _PADDED),
    Encoder("MPNet", "mpnet", _PADDED),
    Encoder("DistilBERT", "distilbert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    Encoder("ALBERT", "albert", _EMBEDDING),
    Encoder("ELECTRA", "electra", _EMBEDDING),
    Encoder("DeBERTa", "deberta", {**_RELATIVE, **_PADDED}),
    Encoder("DeBERTa V2, V3", "deberta-v2", {**_RELATIVE, "position_buckets": 8}),
    Encoder("ModernBERT", "modernbert", {**_PADDED, "local_attention": 8, "global_attn_every_n_layers": 2}),
    Encoder("CamemBERT", "camembert", _PADDED),
    Encoder("Nomic", "nomic_bert", {**_PADDED, "num_key_value_heads": 4}),
    Encoder("GTE", "gte", _PADDED),
    Encoder("Jina V3", "jina_embeddings_v3", _PADDED),
    Encoder("EuroBERT", "eurobert", _GROUPED),
    Encoder("ERNIE", "ernie", _PADDED),
    Encoder("RemBERT", "rembert", {**_PADDED, "input_embedding_size": 16, "output_embedding_size": 16}),
    Encoder("RoFormer", "roformer", {**_PADDED, "embedding_size": 32}),
    Encoder("MobileBERT", "mobilebert", _MOBILE),
    Encoder("ConvBERT", "convbert", _EMBEDDING),
    Encoder("FNet", "fnet", _PADDED),
    Encoder("Longformer", "longformer", {**_PADDED, "attention_window": 8}),
    Encoder("BigBird", "big_bird", _PADDED, vectors=_SPARSE, scores=_SPARSE),
    Encoder("XLM", "xlm", {**_PADDED, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    Encoder("Qwen3-Embedding, Qwen3-Reranker", "qwen3", _GROUPED, logits=True),
    Encoder("Qwen 2, GTE-Qwen2, mxbai-rerank", "qwen2", _GROUPED, logits=True),
    Encoder("EmbeddingGemma", "gemma3_text", {**_WINDOWS, "use_bidirectional_attention": True}, dense=2),
    Encoder("Gemma, BGE-reranker-gemma", "gemma", _GROUPED, logits=True),
    Encoder("Gemma 2", "gemma2", {**_WINDOWS, "query_pre_attn_scalar": 8}),
    Encoder("Mistral, E5-Mistral", "mistral", _WINDOWS),
    Encoder("Llama", "llama", _GROUPED, logits=True),
    Encoder("Phi 3", "phi3", {**_PADDED, "num_key_value_heads": 2}),
    Encoder("Qwen 3 MoE", "qwen3_moe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    Encoder("GPT-2", "gpt2", _LAYERS),
    Encoder("GPT-NeoX", "gpt_neox", _PADDED),
    Encoder("OPT", "opt", {**_PADDED, "word_embed_proj_dim": 32, "ffn_dim": 64}),
    Encoder("BLOOM", "bloom", _LAYERS),
    Encoder("LFM 2", "lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention"]}, scores=False),
    Encoder("T5", "t5", _T5),
    Encoder("GTR, Sentence-T5", "t5", _T5, scores=False, dense=1),
    Encoder("mT5", "mt5", _T5),
    Encoder("UMT5", "umt5", _T5),
    Encoder("LongT5", "longt5", _T5, vectors="the encoder of longt5 is not served by itself", scores=False),
    Encoder("BART", "bart", _BART, vectors="the encoder of bart is not served by itself"),
    Encoder("mBART", "mbart", _BART, vectors="the encoder of mbart is not served by itself"),
)
# fmt: on
TYPES: Mapping[str, Mapping[str, Any]] = {family.model_type: family.given for family in FAMILIES}


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
