"""The tokenizer in a GGUF file's metadata, as the contents of `tokenizer.json` and `tokenizer_config.json`.

Kinds, by `tokenizer.ggml.model`: byte pairs (`gpt2`) with the pre-tokenizer that `tokenizer.ggml.pre` names, and
SentencePiece (`llama`). The patterns are those of the models' own tokenizers; llama.cpp's names for them are in its
src/llama-vocab.cpp. A name that is not known is refused, because another pattern gives other ids.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.models.gguf.reader import GGUF
from headrace.models.tokenizer_files import tokenizer_errors

_SPACE = "\u2581"
_UNREACHABLE = "\ue000"  # Begins what stands for tokens that no text has.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?({_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Each pattern splits what the earlier ones have left.
_PATTERNS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"): (
        _LLAMA,
    ),
    ("chatglm-bpe", "glm4"): (_LLAMA,),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"): (_QWEN,),
    ("qwen35",): (
        _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("tekken",): (_CASED + r"|\p{N}" + _CASED_REST,),
    ("gpt-4o", "llama4", "kanana2"): (_CASED + _ENGLISH + r"?|\p{N}{1,3}" + _CASED_REST,),
    ("gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "trillion", "granite-docling", "mellum"): (_GPT,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT, "[0-9][0-9][0-9]"),
    ("deepseek-llm",): (
        "[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    ("deepseek-coder",): ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense"): (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_SPLITS = {name: patterns for names, patterns in _PATTERNS.items() for name in names}
_NORMALISED = ("qwen2", "deepseek-r1-qwen")  # To composed characters.
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
_MERGE_LAST = (*_BEGIN, "gpt-4o", "llama4", "glm4")  # A word in the vocabulary is a token.
_MOST_SPLITS = 1 << 28  # Characters of all parts of all tokens; Gemma 3's have 1 << 24.
_NAMED = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
_PIECES = {"bos": 1, "eos": 2, "unk": 0}  # SentencePiece's own, where the file names none, as in llama.cpp.
# Texts of tokens that end an answer, a turn or a file, as llama.cpp has them; they are control tokens in any file.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|endoftext|>"),
        *("<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>", "<|end_of_role|>", "<end_of_utterance>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
        *("<|file_sep|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
_END_IDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class Vocabulary:
    """See the module; raises ValueError for what is damaged or not known."""

    def __init__(self, file: GGUF) -> None:
        self._file = file
        self._kind = self._get("model", str, "")
        self._pre = self._get("pre", str, "default")
        texts = self._get("tokens", list)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{file.path} has no tokenizer")
        types = self._get("token_type", array, array("i", [_NORMAL]) * len(texts))
        scores = self._get("scores", array, array("f", [0.0]) * len(texts))
        if sum(len(text) ** 2 for text in texts) > _MOST_SPLITS:
            raise ValueError(f"{file.path}: the vocabulary is damaged: its tokens are too long")
        if not len(texts) == len(types) == len(scores):
            raise ValueError(f"{file.path}: the vocabulary is damaged: as many types and scores as tokens")
        self._types, self._scores = list(types), scores
        ids: dict[str, int] = {}
        for index, text in enumerate(texts):
            if text in ids or not _is_text(text):
                text = f"{_UNREACHABLE}{index}"
            ids[text] = index
            if text in _ENDS and types[index] == _NORMAL:
                self._types[index] = _CONTROL
        self._ids, self._texts = ids, list(ids)

    def _get(self, name: str, kind: type, default: Any = None) -> Any:
        return self._file.get(f"tokenizer.ggml.{name}", kind, default)

    @property
    def _has_prefix(self) -> bool:
        """Whether a text gets a space before it."""
        return self._kind == "llama" and bool(self._get("add_space_prefix", bool, True))

    @property
    def size(self) -> int:
        return len(self._texts)

    @property
    def named_ids(self) -> dict[str, int]:
        """The ids of special tokens by names such as `bos`."""
        own = _PIECES if self._kind == "llama" else {}
        stated = {name: self._get(f"{key}_token_id", int, own.get(name)) for name, key in _NAMED.items()}
        return {name: index for name, index in stated.items() if index is not None and 0 <= index < self.size}

    @property
    def end_ids(self) -> list[int]:
        """The ids that end an answer."""
        ends = [self.named_ids.get("eos"), *(self._get(f"{name}_token_id", int) for name in _END_IDS)]
        ends += [index for text, index in self._ids.items() if text in _ENDS]
        return sorted({index for index in ends if index is not None and 0 <= index < self.size})

    def tokenizer(self) -> str:
        """The contents of tokenizer.json."""
        makers = {"gpt2": self._byte_pairs, "llama": self._pieces}
        make = makers.get(self._kind)
        if make is None:
            raise ValueError(f"{self._file.path}: its tokenizer is of the kind {self._kind[:64]!r}, which is not known")
        with tokenizer_errors(f"{self._file.path}: the vocabulary"):
            made = make()
        self._add_tokens(made)
        return made.to_str()

    def config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        names = {f"{name}_token": self._texts[index] for name, index in self.named_ids.items()}
        templates = {"default": self._file.get("tokenizer.chat_template", str)}
        for name in self._file.get("tokenizer.chat_templates", list, []):
            templates[str(name)] = self._file.get(f"tokenizer.chat_template.{name}", str)
        found = [{"name": name, "template": text} for name, text in templates.items() if text is not None]
        return names | ({"chat_template": found} if found else {})

    def _byte_pairs(self) -> Tokenizer:
        if self._pre not in _SPLITS:
            raise ValueError(f"its pre-tokenizer {self._pre[:64]!r} is not known")
        made = Tokenizer(models.BPE(self._ids, self._merges(), ignore_merges=self._pre in _MERGE_LAST))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[self._pre]]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if self._pre in _NORMALISED:
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        self._put_around(made, self._pre in _BEGIN)
        return made

    def _merges(self) -> list[tuple[str, str]]:
        """The pairs, in whose texts a space is only between both."""
        pairs = [(merge, merge.index(" ", 1)) for merge in self._get("merges", list, [])]
        return [(merge[:at], merge[at + 1 :]) for merge, at in pairs]

    def _pieces(self) -> Tokenizer:
        unknown = self._texts[self.named_ids.get("unk", 0)]
        has_bytes = "<0x00>" in self._ids  # Whatever their types are.
        merges = list(self._merges_by_score())
        model = models.BPE(self._ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
        made = Tokenizer(model)
        steps: list[Any] = [normalizers.Prepend(_SPACE)] if self._has_prefix else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if self._has_prefix else parts)
        self._put_around(made, True)
        return made

    def _merges_by_score(self) -> Iterator[tuple[str, str]]:
        """Of two neighbours those are joined first whose piece has the highest score."""
        kinds = (_NORMAL, _USER_DEFINED, _UNUSED)
        known = {text: index for text, index in self._ids.items() if self._types[index] in kinds}
        for text in sorted(known, key=lambda text: (-self._scores[known[text]], known[text])):
            parts = ((text[:end], text[end:]) for end in range(1, len(text)))
            found = [(left, right) for left, right in parts if left in known and right in known]
            yield from sorted(found, key=lambda pair: (known[pair[0]], known[pair[1]]))

    def _put_around(self, made: Tokenizer, has_begin: bool) -> None:
        """Adds the tokens that begin and end a text, where the file says so or its kind does."""
        named = self.named_ids
        begin = [self._texts[named["bos"]]] if self._get("add_bos_token", bool, has_begin) and "bos" in named else []
        end = [self._texts[named["eos"]]] if self._get("add_eos_token", bool, False) and "eos" in named else []
        if begin or end:
            made.post_processor = processors.TemplateProcessing(
                [*begin, "$A", *end],
                [*begin, "$A", *end, *begin, "$B", *end],
                special_tokens=[(text, self._ids[text]) for text in {*begin, *end}],
            )

    def _add_tokens(self, made: Tokenizer) -> None:
        """Tokens that are found in a text before it is split, in the order of their ids."""
        strips = self._file.metadata.get("general.architecture") == "phi3"
        kept = {self.named_ids.get(name) for name in ("bos", "unk")}
        added: list[AddedToken] = []
        for text, index in self._ids.items():
            kind = self._types[index]
            if kind not in (_CONTROL, _UNKNOWN, _USER_DEFINED) or text.startswith(_UNREACHABLE):
                continue
            is_special, has_space = kind != _USER_DEFINED, _SPACE in text
            if has_space and self._has_prefix and not is_special:
                continue  # It is made of its pieces: the normalizer would put the prefix before it.
            # In Phi 3's vocabulary spaces behind a control token belong to it.
            rstrip = strips and index not in kept and text != "<|endoftext|>"
            added.append(
                AddedToken(text, special=is_special, normalized=has_space and not self._has_prefix, rstrip=rstrip)
            )
        made.add_tokens(added)


def _is_text(text: str) -> bool:
    """Whether it has no bytes that are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
