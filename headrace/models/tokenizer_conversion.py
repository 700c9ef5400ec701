"""Converts a tokenizer that has no tokenizer.json: `python -m headrace.models.tokenizer_conversion FOLDER`.

Writes JSON: `tokenizer`, the contents of such a file, and `named`, the special tokens that have names. transformers
reads the folder's files and knows the ids and special tokens of each class. Text becomes pieces as SentencePiece itself
makes them: conversions of transformers 5 differ there in spaces, normalisation and begin tokens, and for Marian and
M2M100 it has none.
"""

import base64
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE = "\u2581"
_UNREACHABLE = "\ue000"  # Begins the pieces that no text is split into, such as those of the target language only.
_JOINER, _HELD = "\u200d", "\ue001"
# Their slow versions add the begin token unless the flag says otherwise.
_BEGIN_TEXTS = ("CodeLlama", "Gemma", "Llama")
_PREPARE_TEXTS = ("Albert", "DebertaV2", "FNet", "RemBert", "XLNet")  # They change it before SentencePiece gets it.
# The special tokens of a tekken.json of versions 3 and 7, which may name none.
_TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_PROBES = ("the fox", " a  b", "a\u00a0b", "a\tb\nc", "\x07a", "e\u0301", "\ufb01", "\u65e5\u672c", "A.")
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _convert(folder: Path) -> str:
    sys.modules["torch"] = None  # type: ignore[assignment]  # It would take seconds, and nothing here needs it.
    tekken = folder / "tekken.json"
    if tekken.is_file() and not any(any(folder.glob(pattern)) for pattern in ("vocab.*", "*.model", "*.spm")):
        return json.dumps({"tokenizer": _of_tekken(json.loads(tekken.read_bytes())).to_str(), "named": _NAMED})
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    proto, has_vocabulary = _sentencepiece(folder), any(folder.glob("vocab.*"))
    if proto is None and not has_vocabulary and any(folder.glob("*.model")):  # tiktoken's lacks pattern and specials.
        raise ValueError("its *.model is not one of SentencePiece; add the tokenizer.json")
    made: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config = get_tokenizer_config(folder, local_files_only=True)
    kind = str(config.get("tokenizer_class") or type(made).__name__).removesuffix("Fast").removesuffix("Tokenizer")
    backend = getattr(made, "backend_tokenizer", None)
    if backend is not None and kind in _BEGIN_TEXTS:
        made.add_bos_token = bool(config.get("add_bos_token", True))
        made.add_eos_token = bool(config.get("add_eos_token", False))
    if backend is None and proto is not None:
        backend = _of_pieces(made, proto)
    if backend is None:
        raise ValueError(f"{type(made).__name__} has no fast version")
    if proto is not None:
        _compute_as_sentencepiece(backend, proto)
    if proto is not None and kind not in _PREPARE_TEXTS:
        _split_as_sentencepiece(backend, proto, is_legacy=config.get("legacy") is not False)
    if proto is not None:
        _check(made, proto, backend)
    return json.dumps({"tokenizer": backend.to_str(), "named": made.special_tokens_map})


def _of_tekken(stated: Any) -> Tokenizer:
    """Mistral's own file: special tokens, then byte pairs by rank, which merge as in tiktoken."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config, special = stated["config"], stated.get("special_tokens")
    if special is None and config["version"] not in ("v3", "v7"):
        raise ValueError(f"tekken.json of version {config['version']} has no special_tokens; add the tokenizer.json")
    names = [token["token_str"] for token in sorted(special or [], key=lambda token: token["rank"])]
    names = names or [*_TEKKEN_TOKENS]
    names += [f"<SPECIAL_{index}>" for index in range(len(names), config["default_num_special_tokens"])]
    count = config["default_vocab_size"] - len(names)
    ranks = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(stated["vocab"][:count])}
    letters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    text = {piece: piece.decode("latin-1").translate(letters) for piece in ranks}
    merges = []
    for piece in ranks:
        parts = ((piece[:end], piece[end:]) for end in range(1, len(piece)))
        known = [(left, right) for left, right in parts if left in ranks and right in ranks]
        merges += [
            (text[left], text[right]) for left, right in sorted(known, key=lambda pair: [ranks[p] for p in pair])
        ]
    ids = {text[piece]: rank + len(names) for piece, rank in ranks.items()}
    ids |= {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", ids["<s>"])]
    )
    return backend


def _sentencepiece(folder: Path) -> Any:
    """The folder's SentencePiece model, None where it has none."""
    from google.protobuf.message import DecodeError

    messages: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    for path in (*sorted(folder.glob("*.model")), folder / "source.spm"):
        proto = messages.ModelProto()
        try:
            if path.is_file() and proto.ParseFromString(path.read_bytes()) and proto.pieces:
                return proto
        except DecodeError:  # A vocabulary of tiktoken has the same name.
            continue
    return None


def _compute_as_sentencepiece(backend: Tokenizer, proto: Any) -> None:
    """Takes the file's algorithm where transformers makes byte pairs of any, or drops its bytes; raises ValueError."""
    spec, model = proto.trainer_spec, backend.model
    if spec.model_type == spec.WORD or spec.treat_whitespace_as_suffix:
        raise ValueError("its SentencePiece model is one of whole words, or has spaces behind them")
    if not isinstance(model, models.BPE):
        if isinstance(model, models.Unigram) and spec.byte_fallback:
            own = json.loads(backend.to_str())["model"]
            backend.model = models.Unigram([*map(tuple, own["vocab"])], own["unk_id"], byte_fallback=True)
        return
    if spec.model_type != spec.UNIGRAM:
        model.unk_token = None if spec.byte_fallback else proto.pieces[spec.unk_id].piece
    elif all(backend.token_to_id(piece.piece) == index for index, piece in enumerate(proto.pieces)):
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        backend.model = models.Unigram(pieces, spec.unk_id, spec.byte_fallback)
    else:
        raise ValueError("its ids are not those of its SentencePiece model")


def _split_as_sentencepiece(backend: Tokenizer, proto: Any, is_legacy: bool) -> None:
    """Normalises and splits as SentencePiece does; legacy versions begin each part between special tokens anew."""
    spec = proto.normalizer_spec
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if spec.remove_extra_whitespaces:
        steps[:0] = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.name == "nmt_nfkc":  # `Precompiled` loses marks behind a character that it replaces; `Nmt` the joiner.
        joiner = normalizers.Replace(_JOINER, _HELD), normalizers.Replace(_HELD, _JOINER)
        steps[:0] = [joiner[0], normalizers.Nmt(), normalizers.NFKC(), joiner[1]]
    elif spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(spec.precompiled_charsmap))
    backend.pre_tokenizer = None
    if spec.add_dummy_prefix and is_legacy:
        steps.append(normalizers.Prepend(_SPACE))
    elif spec.add_dummy_prefix:
        # A space before text that may begin with one itself, as the normalizer wrote it; then as that writes it.
        first = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
        rest = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, rest])
    backend.normalizer = normalizers.Sequence(steps)
    parts: list[Any] = [decoders.Replace(_UNREACHABLE, ""), decoders.Replace(_SPACE, " ")]
    parts += [decoders.ByteFallback()] if proto.trainer_spec.byte_fallback else []
    parts += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else [])]
    backend.decoder = decoders.Sequence(parts)


def _check(made: Any, proto: Any, backend: Tokenizer) -> None:
    """Raises ValueError for a class that takes few of the model's pieces, or changes texts before it splits them."""
    known = backend.get_vocab()
    if 2 * sum(piece.piece in known for piece in proto.pieces) < len(proto.pieces):
        raise ValueError(f"{type(made).__name__} leaves out most pieces of its SentencePiece model")
    in_python = getattr(made, "backend_tokenizer", None) is None
    if in_python and any(made.encode(text, add_special_tokens=False) != _ids(backend, text) for text in _PROBES):
        raise ValueError(f"{type(made).__name__} has no fast version, and does more than its SentencePiece model")


def _ids(backend: Tokenizer, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def _of_pieces(made: Any, proto: Any) -> Tokenizer:
    """The pieces of a SentencePiece model with the ids of a tokenizer in Python."""
    from transformers.tokenization_utils_base import generate_merges

    # One without an id of its own is the unknown token.
    special = [str(token) for token in made.all_special_tokens]
    special = [
        token
        for token in special
        if made.convert_tokens_to_ids(token) != made.unk_token_id or token == str(made.unk_token)
    ]
    codes = list(getattr(made, "supported_language_codes", ()))  # Marian's.
    ids: dict[str, int] = {**made.get_vocab(), **{token: made.convert_tokens_to_ids(token) for token in special}}
    scores = {piece.piece: piece.score for piece in proto.pieces}
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        table = [(f"{_UNREACHABLE}{index}", 0.0) for index in range(max(ids.values()) + 1)]
        for piece, index in ids.items():
            is_known = piece in scores or piece in special or piece in codes
            table[index] = (piece if is_known else _UNREACHABLE + piece, scores.get(piece, 0.0))
        model: Any = models.Unigram(table, unk_id=made.unk_token_id, byte_fallback=proto.trainer_spec.byte_fallback)
    else:
        ranks = {piece: index for index, piece in enumerate(scores) if piece in ids}
        model = models.BPE(
            ids,
            generate_merges(ranks),
            unk_token=str(made.unk_token),
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    backend = Tokenizer(model)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in codes])
    around = made.build_inputs_with_special_tokens([-1])
    names = {index: str(made.convert_ids_to_tokens(index)) for index in around if index >= 0}
    single = " ".join(names.get(index, "$A") for index in around)
    backend.post_processor = processors.TemplateProcessing(
        single, single.replace("$A", "$A $B"), special_tokens=[(name, index) for index, name in names.items()]
    )
    return backend


if __name__ == "__main__":
    sys.stdout.write(_convert(Path(sys.argv[1])))
