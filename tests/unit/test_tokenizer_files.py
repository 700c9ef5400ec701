"""A folder's tokenizer.json is used as it is, whatever class and type of model the files beside it name."""

import itertools
import json
import re

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.models.tokenizer_files import read_tokenizer

TEXTS = ["Hello, world! 12345 don't", " a  b\n\nc\t d ~", "日本語 текст café 🦄", "x1y22z333</s> <s>4444 <unk>", ""]
TYPES = re.findall(
    r"\S+", "llama qwen2 qwen3 gemma3_text phi3 gpt2 t5 mbart m2m_100 bert roberta deepseek_v3 mistral3 modernbert"
)
CLASSES = re.findall(
    r"\S+", "Llama LlamaTokenizerFast GPT2 Qwen2 PreTrainedTokenizerFast Gemma T5 Bert NoSuch TokenizersBackend"
)


def digits_by_three() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("~", " tilde "), normalizers.NFC()])
    split = pre_tokenizers.Split(Regex(r"\d{1,3}|\p{L}+|\s+|[^\s\p{L}\d]+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=bytes_.alphabet())
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    digits_by_three().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, name="tokenizer_config.json", **values):
    (folder / name).write_text(json.dumps(values))


def test_ids_are_those_of_the_file_for_every_type_and_class(folder):
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [file.encode(text).ids for text in TEXTS]
    for kind, name in itertools.product(TYPES, CLASSES):
        configure(folder, "config.json", model_type=kind)
        tokenizer_class = name if "Token" in name else f"{name}Tokenizer"
        flags = {"add_bos_token": False, "add_eos_token": True, "add_prefix_space": True, "legacy": False}
        configure(folder, tokenizer_class=tokenizer_class, bos_token="<s>", eos_token="</s>", unk_token=None, **flags)
        read = read_tokenizer(folder)
        assert [read.backend.encode(text).ids for text in TEXTS] == expected, (kind, name)
        assert read.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_length_limits_and_padding_of_the_file_are_off(folder):
    tokenizer = digits_by_three()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(read_tokenizer(folder).backend.encode("one two 12345").ids) == len(
        digits_by_three().encode("one two 12345")
    )


def special_ids(read):
    return {token.content for token in read.backend.get_added_tokens_decoder().values() if token.special}


def test_tokens_that_only_the_configuration_has_are_added(folder):
    size = read_tokenizer(folder).backend.get_vocab_size()
    added = {
        str(size + 1): {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": True},
        str(size): {"content": "<think>", "special": False},
    }
    tool = {"__type": "AddedToken", "content": "<tool>", "lstrip": True}
    configure(
        folder, added_tokens_decoder=added, eos_token="<|im_end|>", extra_special_tokens=[tool], image_token="<i>"
    )
    read = read_tokenizer(folder)
    ids = read.backend.encode("a<think><|im_end|> b <tool>", add_special_tokens=False).ids
    assert ids == [read.backend.token_to_id(token) for token in ("a", "<think>", "<|im_end|>", "b", "<tool>")]
    assert (read.backend.token_to_id("<think>"), read.end_ids) == (size, {size + 1})
    assert special_ids(read) == {"<unk>", "<s>", "</s>", "<|im_end|>", "<tool>", "<i>"}
    assert read.special_tokens == {"eos_token": "<|im_end|>", "image_token": "<i>"}


def test_a_token_of_the_file_keeps_its_flags_and_becomes_special_if_it_is_declared_so(folder):
    tokenizer = digits_by_three()
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token="wrong")
    configure(folder, "special_tokens_map.json", bos_token="<s>", eos_token={"content": "<end>", "rstrip": False})
    read = read_tokenizer(folder)
    assert "<end>" in special_ids(read)
    ids = read.backend.encode("<end>  a", add_special_tokens=False).ids
    assert ids == [read.backend.token_to_id(token) for token in ("<end>", "a")]
    assert read.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}


def test_flags_in_added_tokens_decoder_replace_those_of_the_file(folder):
    tokenizer = digits_by_three()
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True), AddedToken("<think>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    stated = {"content": "<end>", "lstrip": True, "rstrip": False, "normalized": False, "special": True}
    thinking = {"content": "<think>", "special": False}
    configure(folder, added_tokens_decoder={str(size - 2): stated, str(size - 1): thinking})
    read = read_tokenizer(folder)
    ids = read.backend.encode("a  <end> a", add_special_tokens=False).ids
    assert ids == [read.backend.token_to_id(token) for token in ("a", "<end>", "Ġ", "a")]
    assert {"<end>", "<think>"} <= special_ids(read)
    assert read.backend.get_vocab_size() == size


def test_new_special_tokens_get_ids_in_transformers_order(folder):
    size = read_tokenizer(folder).backend.get_vocab_size()
    configure(folder, image_token="<i>", pad_token="<p>", additional_special_tokens=["<x>"])
    configure(folder, "special_tokens_map.json", eos_token="<e>", additional_special_tokens=["<x>", "<y>"])
    backend = read_tokenizer(folder).backend
    new = ["<e>", "<p>", "<i>", "<x>", "<y>"]
    assert [backend.token_to_id(token) for token in new] == list(range(size, size + 5))


def test_a_decoder_that_panics_is_refused(folder):
    tokenizer = digits_by_three()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 1, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the decoder, which fails on .*cannot be read: PanicEx"):
        read_tokenizer(folder)


def test_added_tokens_of_old_folders_keep_their_order(folder):
    size = read_tokenizer(folder).backend.get_vocab_size()
    configure(folder, "added_tokens.json", **{"<b>": size + 1, "<a>": size})
    backend = read_tokenizer(folder).backend
    assert [backend.token_to_id(token) for token in ("<a>", "<b>")] == [size, size + 1]


def test_special_tokens_are_split_if_the_configuration_says_so(folder):
    configure(folder, split_special_tokens=True)
    assert "</s>" not in read_tokenizer(folder).backend.encode("</s>").tokens


def test_chat_templates_are_read_from_each_place(folder):
    assert read_tokenizer(folder).templates == {}
    configure(folder, "processor_config.json", chat_template="of an old processor")
    assert read_tokenizer(folder).templates == {"default": "of an old processor"}
    configure(folder, "chat_template.json", chat_template="of a processor")
    assert read_tokenizer(folder).templates == {"default": "of a processor"}
    configure(folder, chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert read_tokenizer(folder).templates == {"default": "a", "tool_use": "b"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("c")
    (folder / "chat_template.jinja").write_text("d")
    assert read_tokenizer(folder).templates == {"default": "d", "rag": "c"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("contents", ["", "{", "[1]", '{"model": {}, "eos_token": 1, "added_tokens_decoder": 3}'])
def test_a_broken_file_is_one_line_that_names_it(folder, name, contents):
    (folder / name).write_text(contents)
    if name == "special_tokens_map.json" and contents.startswith('{"'):
        return  # Names without tokens mean nothing.
    with pytest.raises(ValueError, match=f"^[^\n]*{folder}[^\n]*$"):
        read_tokenizer(folder)
