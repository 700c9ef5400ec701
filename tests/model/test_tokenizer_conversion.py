"""A folder without tokenizer.json gets the ids of its slow tokenizer, which is SentencePiece for most."""

import base64
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import M2M100Tokenizer, MarianTokenizer, PLBartTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from headrace.models import tokenizer_files
from headrace.models.tokenizer_files import read_tokenizer
from tests.support.full import FULL

STRINGS = 10_000 if FULL else 300
ALPHABETS = [
    "abcdefghij klmnop",
    "ABC XYZ",
    "0123456789",
    " \t",
    "\r\n",
    " ",
    "日本語東京こ",
    "привет",
    "éàïñü",
    "مرحبا",
]
ALPHABETS += ["안녕", "नमस्ते", "🦄👍🏽\u200d", "<>|[]{}.,!?'\"-_~`▁", "\u00a0\u200b\u3000\ufeff", "ﬁ½Ⅳ①"]
WORDS = ["the", " fox", "story", "Once", " and ", "日本語", "привет", "  ", "cafe\u0301", "ｶﾞ"]
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
SENTENCEPIECE = {
    "llama": {"model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, **IDENTITY},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "bytes": {"model_type": "unigram", "byte_fallback": True, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "bpe": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
}


FORKS = """
import json, os, runpy, sys
sys.modules["torch"] = None
from transformers import AutoTokenizer, convert_slow_tokenizer, tokenization_utils_base
for line in sys.stdin:
    module, folder, *outputs = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[1:] = [folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    break
"""


@pytest.fixture(scope="module", autouse=True)
def conversions(tmp_path_factory):
    """A conversion is a fork of a process that has imported transformers, which takes seconds."""
    outputs = [tmp_path_factory.mktemp("conversions") / name for name in ("output", "errors")]
    command = (sys.executable, "-c", FORKS)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(command, **_):
            _, _, module, folder = command
            print(json.dumps([module, folder, *map(str, outputs)]), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            return subprocess.CompletedProcess(command, code, *(path.read_bytes() for path in outputs))

        with pytest.MonkeyPatch.context() as patch:
            own = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
            patch.setattr(tokenizer_files, "subprocess", own)
            yield
        process.stdin.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with models of each kind, all trained on the project's own pages."""
    folder = tmp_path_factory.mktemp("trained")
    pages = "\n".join(page.read_text() for page in sorted(Path("docs").glob("*.md"))[:12])
    corpus = folder / "corpus.txt"
    corpus.write_text(
        pages + "日本語のテキスト 東京\nпривет мир\ncafé déjà vu\nمرحبا بالعالم\n안녕하세요 세계\nनमस्ते दुनिया\n" * 30  # noqa: RUF001
    )
    for name, options in SENTENCEPIECE.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(folder / name), vocab_size=1100, minloglevel=2, **options
        )
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words.train([str(corpus)], trainers.WordPieceTrainer(vocab_size=1500, special_tokens=special, show_progress=False))
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(words.get_vocab(), key=words.token_to_id)))
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.train([str(corpus)], trainers.BpeTrainer(vocab_size=1200, special_tokens=["<|endoftext|>"]))
    pairs.model.save(str(folder))
    return folder


def texts(*special):
    draw = random.Random(7)
    for _ in range(STRINGS):
        parts = []
        for _ in range(draw.randint(0, 12)):
            alphabet = draw.choice(ALPHABETS)
            word = "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 6)))
            parts.append(draw.choice([word, word, draw.choice(WORDS), *special]))
        yield "".join(parts)


def check(folder, expected, *special, unigram=None):
    """Of equally likely pieces SentencePiece takes either, by the rounding of its sums; `unigram` is its model."""
    read = read_tokenizer(folder)

    def score(ids):
        pieces = map(read.backend.id_to_token, ids)
        return sum(unigram.get_score(unigram.piece_to_id(piece)) for piece in pieces)

    for text in texts(*special):
        ids, wanted = read.backend.encode(text, add_special_tokens=False).ids, expected(text)
        if ids != wanted:
            assert unigram is not None, (text, ids, wanted)
            assert score(ids) == pytest.approx(score(wanted), abs=1e-3), (text, ids, wanted)
            assert len(ids) == len(wanted)
    return read


def save(folder, config, **files):
    for name, source in files.items():
        shutil.copy(source, folder / name.replace("__", "."))
    own = {name: value for name, value in config.items() if name != "model_type"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps({"model_type": config.get("model_type", "llama")}))
    return folder


def processor_of(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def pieces_of(path, shift=0, end=None):
    """The ids of SentencePiece, with those of fairseq where `shift` is 1; parts beside "</s>" begin anew."""
    processor = processor_of(path)

    def ids(text):
        parts = re.split("(</s>)", text) if end is not None else [text]
        encoded = ([end] if part == "</s>" else processor.encode(part) for part in parts)
        return [{0: 3}.get(i, i + 1) if shift and i != end else i for part in encoded for i in part]

    return ids


LLAMA = {"tokenizer_class": "LlamaTokenizer"}
# Configuration, model, file, shift of ids, end token in the text, special tokens around it.
PIECES = [
    (LLAMA | {"legacy": True}, "llama", "tokenizer.model", 0, 2, ["<s>"]),
    ({"tokenizer_class": "T5Tokenizer", "model_type": "t5"}, "t5", "spiece.model", 0, 1, ["</s>"]),
    ({"tokenizer_class": "T5Tokenizer", "model_type": "t5"}, "bytes", "spiece.model", 0, 1, ["</s>"]),
    (LLAMA, "unigram", "tokenizer.model", 0, 2, ["<s>"]),
    (LLAMA, "bpe", "tokenizer.model", 0, 2, ["<s>"]),
]
MORE_PIECES = [
    (LLAMA | {"legacy": False}, "llama", "tokenizer.model", 0, None, ["<s>"]),
    ({"tokenizer_class": "LlamaTokenizerFast", "model_type": "mistral"}, "llama", "tokenizer.model", 0, 2, ["<s>"]),
    ({"tokenizer_class": "GemmaTokenizer", "model_type": "gemma"}, "gemma", "tokenizer.model", 0, None, ["<bos>"]),
    ({"tokenizer_class": "XLMRobertaTokenizer"}, "unigram", "sentencepiece.bpe.model", 1, 2, ["<s>", "</s>"]),
    ({"tokenizer_class": "MBartTokenizer"}, "unigram", "sentencepiece.bpe.model", 1, 2, ["</s>", "en_XX"]),
    ({"tokenizer_class": "NllbTokenizer"}, "bpe", "sentencepiece.bpe.model", 1, 2, ["eng_Latn", "</s>"]),
]


@pytest.mark.parametrize(
    ("config", "model", "file", "shift", "end", "around"),
    [*PIECES, *(pytest.param(*values, marks=pytest.mark.full) for values in MORE_PIECES)],
)
def test_pieces_are_those_of_sentencepiece(made, tmp_path, config, model, file, shift, end, around):
    source = made / f"{model}.model"
    expected = pieces_of(source, shift, end)
    special = ["</s>"] if end is not None else []
    unigram = processor_of(source) if model in ("t5", "bytes", "unigram") else None
    read = check(save(tmp_path, config, **{file: source}), expected, *special, unigram=unigram)
    encoded = read.backend.encode("the fox")
    assert [token for token in encoded.tokens if token in around] == around
    assert read.backend.decode(encoded.ids) == "the fox"


def vocabulary_of(folder, models_, first, last=()):
    """A vocab.json with the pieces of these models in an order of its own."""
    pieces = [
        processor.id_to_piece(i) for processor in map(processor_of, models_) for i in range(processor.get_piece_size())
    ]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in first]
    random.Random(3).shuffle(pieces)
    path = folder / "vocab.json"
    path.write_text(json.dumps({piece: i for i, piece in enumerate([*first, *pieces, *last])}))


def test_marian_and_m2m_equal_their_slow_versions(made, tmp_path):
    marian, m2m = tmp_path / "marian", tmp_path / "m2m"
    for folder in (marian, m2m):
        folder.mkdir()
    vocabulary_of(marian, [made / "t5.model", made / "unigram.model"], ["</s>", "<unk>"], [">>fra<<", "<pad>"])
    config = {"tokenizer_class": "MarianTokenizer", "model_type": "marian"}
    save(marian, config, source__spm=made / "t5.model", target__spm=made / "unigram.model")
    vocabulary_of(m2m, [made / "bpe.model"], ["<s>", "<pad>", "</s>", "<unk>"])
    config = {"tokenizer_class": "M2M100Tokenizer", "model_type": "m2m_100", "src_lang": "en", "tgt_lang": "fr"}
    save(m2m, config, sentencepiece__bpe__model=made / "bpe.model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unigram = processor_of(made / "t5.model")
        for folder, slow_class, model in ((marian, MarianTokenizer, unigram), (m2m, M2M100Tokenizer, None)):
            slow = slow_class.from_pretrained(folder)
            expected = partial(slow, add_special_tokens=False)
            read = check(folder, lambda text, slow=expected: slow(text).input_ids, unigram=model)
            for text in ("the fox", ">>fra<< the fox"):
                assert read.backend.encode(text).ids == slow(text).input_ids
            ids = slow(text_target="привет мир").input_ids
            assert read.backend.decode(ids) == "привет мир"


def test_a_special_token_without_an_id_of_its_own_takes_none_from_the_unknown_one(made, tmp_path):
    """PLBart's `<mask>` for several languages: both had its id, and each reading of the folder kept another of them."""
    config = {"tokenizer_class": "PLBartTokenizer", "model_type": "plbart", "language_codes": "multi"}
    slow = PLBartTokenizer.from_pretrained(save(tmp_path, config, sentencepiece__bpe__model=made / "bpe.model"))
    for _ in range(3):
        backend = read_tokenizer(tmp_path).backend
        assert backend.token_to_id("<unk>") == slow.unk_token_id
        for text in ("the fox", "京 the"):
            assert backend.encode(text).ids == slow(text).input_ids


@pytest.mark.parametrize("options", [{"model_type": "word"}, {"treat_whitespace_as_suffix": True}], ids=str)
def test_pieces_that_no_library_splits_are_refused(tmp_path, options):
    with (save(tmp_path, LLAMA) / "tokenizer.model").open("wb") as file:
        texts = iter(["the fox and the dog"] * 9)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=file, vocab_size=50, hard_vocab_limit=False, minloglevel=2, **options
        )
    with pytest.raises(ValueError, match="is one of whole words, or has spaces behind them"):
        read_tokenizer(tmp_path)


REFUSED = {
    "GPTSw3Tokenizer": ("spiece.model", "bpe", "has no fast version, and does more than its SentencePiece model"),
    "XGLMTokenizer": ("sentencepiece.bpe.model", "unigram", "leaves out most pieces of its SentencePiece model"),
    "BartphoTokenizer": ("sentencepiece.bpe.model", "unigram", "leaves out most pieces of its SentencePiece model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_not_its_sentencepiece_model_is_refused(made, tmp_path, name):
    file, model, message = REFUSED[name]
    folder = save(tmp_path, {"tokenizer_class": name, "model_type": "mbart"}, **{file: made / f"{model}.model"})
    (folder / "dict.txt").write_text("the 1\n")
    with pytest.raises(ValueError, match=f"{name} {message}"):
        read_tokenizer(folder)


@pytest.mark.parametrize("lower", [True, pytest.param(False, marks=pytest.mark.full)])
def test_word_pieces_equal_the_slow_version(made, tmp_path, lower):
    config = {"tokenizer_class": "BertTokenizer", "model_type": "bert", "do_lower_case": lower}
    folder = save(tmp_path, config, vocab__txt=made / "vocab.txt")
    slow = BertTokenizerLegacy(vocab_file=str(folder / "vocab.txt"), do_lower_case=lower)
    check(folder, lambda text: slow.convert_tokens_to_ids(slow.tokenize(text)), "[MASK]")


def test_byte_pairs_equal_those_of_the_files(made, tmp_path):
    config = {"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"}
    folder = save(tmp_path, config, vocab__json=made / "vocab.json", merges__txt=made / "merges.txt")
    pairs = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.add_special_tokens(["<|endoftext|>"])
    read = check(folder, lambda text: pairs.encode(text).ids, "<|endoftext|>")
    assert read.end_ids == {pairs.token_to_id("<|endoftext|>")}


TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def save_tekken(made, folder, **more):
    """Mistral's own file with the byte pairs of `made`, and their ranks; more pieces than are used follow."""
    letters = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
    pieces = [b"".join(map(letters.get, piece)) for piece in json.loads((made / "vocab.json").read_text())]
    longer = [piece for piece in pieces if len(piece) > 1 and piece != b"<|endoftext|>"]
    ranks = {piece: rank for rank, piece in enumerate([*(bytes([byte]) for byte in range(256)), *longer])}
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*ranks, b"never used"])
    ]
    config = {
        "pattern": TEKKEN,
        "default_vocab_size": len(ranks) + 40,
        "default_num_special_tokens": 40,
        "version": "v3",
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": entries} | more))
    return ranks


def merged(word, ranks):
    """A word's ids as tiktoken makes them: the neighbours that make the piece of the lowest rank merge first."""
    parts = [word] if word in ranks else [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [left + right for left, right in itertools.pairwise(parts)]
        best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        if pairs[best] not in ranks:
            break
        parts[best : best + 2] = [pairs[best]]
    return [ranks[part] + 40 for part in parts]


def test_tekken_equals_the_byte_pairs_of_its_file(made, tmp_path):
    ranks = save_tekken(made, tmp_path)
    words = regex.compile(TEKKEN)
    read = check(tmp_path, lambda text: [i for word in words.findall(text) for i in merged(word.encode(), ranks)])
    assert (read.end_ids, read.backend.encode("[INST]the[SYSTEM_PROMPT]<SPECIAL_39>").ids[:2]) == ({2}, [1, 3])
    assert read.backend.encode("[SYSTEM_PROMPT]<SPECIAL_39>").ids == [1, 17, 39]
    assert read.backend.decode(read.backend.encode("日本語 🦄").ids) == "日本語 🦄"


def test_tekken_has_the_special_tokens_that_it_names(made, tmp_path):
    names = ["<unk>", "<s>", "</s>", "[THINK]"]
    tokens = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    save_tekken(made, tmp_path, special_tokens=tokens)
    assert read_tokenizer(tmp_path).backend.encode("[THINK]<SPECIAL_4>").ids == [1, 3, 4]
    stated = json.loads((tmp_path / "tekken.json").read_text()) | {"special_tokens": None}
    stated["config"]["version"] = "v13"
    (tmp_path / "tekken.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match=r"version v13 has no special_tokens; add the tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_what_cannot_be_converted_is_one_line_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "subprocess", subprocess)  # In a process of its own, as it is served.
    folder = save(tmp_path, {"tokenizer_class": "LlamaTokenizer"})
    (folder / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = r"ValueError: its \*.model is not one of SentencePiece; add the tokenizer\.json"
    with pytest.raises(ValueError, match=f"^the tokenizer in {folder} cannot be converted: {message}$"):
        read_tokenizer(folder)
