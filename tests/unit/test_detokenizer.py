"""Text comes as soon as it is certain: whole characters, nothing of a stop string, nothing lost."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace_transformer.generation.chunks import Assembler, Origin
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.text.detokenizer import Decoder, Detokenizer, StopFinder

CORPUS = ["Once upon a time there was a dog.", "Zoë ate naïve crêpes 🥞 in 東京 😀😃 and sang ¡olé!"] * 20


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<plain>", "東京"])
    return tokenizer


def metaspace():
    """Writes a space before the first word and drops it on decoding, as SentencePiece's models do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<plain>", "▁x"])
    return tokenizer


def byte_fallback():
    """Llama 2's and Mistral's way: a character outside the vocabulary is written as bytes, each a token."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "é", "\ufffd", "fox", "▁fox", "東", "", "<0x0>", "<plain>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<plain>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def words():
    """Has no decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("1", "a", "b", "", "é"))}))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


BYTE_LEVEL, METASPACE, BYTE_FALLBACK, WORDS = byte_level(), metaspace(), byte_fallback(), words()


def stream(tokenizer, ids, stop=(), prompt_ids=()):
    detokenizer = Detokenizer(Decoder(tokenizer), prompt_ids, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            return pieces
    return [*pieces, detokenizer.flush()]


def test_a_character_of_several_tokens_comes_whole():
    text = "a🦄b"
    ids = BYTE_LEVEL.encode(text).ids
    assert len(ids) > 3
    assert [piece for piece in stream(BYTE_LEVEL, ids) if piece] == ["a", "🦄", "b"]


def ids_of(tokenizer, *tokens):
    return [tokenizer.token_to_id(token) for token in tokens]


def random_ids(tokenizer, often=()):
    """Ids of the vocabulary, of special tokens and unknown ones; ids in `often` come in runs."""
    anything = st.integers(0, tokenizer.get_vocab_size() + 3)
    return st.lists(anything | st.sampled_from(often) if often else anything, max_size=80)


BYTES_AND_SPECIAL = ids_of(BYTE_FALLBACK, "<0x0A>", "<0xE2>", "<0x9C>", "<0x93>", "</s>", "fox", "▁", "a")


@given(st.data())
@pytest.mark.parametrize(
    ("tokenizer", "often"),
    [(BYTE_LEVEL, ()), (METASPACE, ()), (WORDS, ()), (BYTE_FALLBACK, ()), (BYTE_FALLBACK, BYTES_AND_SPECIAL)],
)
def test_the_pieces_of_any_ids_add_up_to_the_decoded_whole(tokenizer, often, data):
    prompt_ids = data.draw(random_ids(tokenizer, often).filter(lambda ids: len(ids) <= 6))
    ids = data.draw(random_ids(tokenizer, often))
    before = tokenizer.decode(prompt_ids)
    whole = tokenizer.decode(prompt_ids + ids)
    assert "".join(stream(tokenizer, ids, prompt_ids=prompt_ids)) == whole[len(before) :]


@given(st.text(max_size=40).filter(lambda text: "\ufffd" not in text))
def test_no_piece_has_a_part_of_a_character(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE, WORDS])
def test_an_id_with_only_one_text_is_decoded_once(tokenizer):
    class Counting:
        decoded = 0

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, *arguments, **named):
            self.decoded += 1
            return tokenizer.decode(*arguments, **named)

    backend = Counting()
    detokenizer = Detokenizer(Decoder(backend), (), ())
    backend.decoded = 0
    ids = [id for id in range(tokenizer.get_vocab_size()) if tokenizer.decode([id]) == "a"][:1] * 50
    text = "".join(map(detokenizer.push, ids))
    assert text + detokenizer.flush() == tokenizer.decode(ids)
    assert backend.decoded < 10


def test_a_prompt_whose_end_is_written_in_bytes_does_not_damage_the_answer():
    # Its last six ids begin in the middle of a character.
    prompt = ids_of(BYTE_FALLBACK, *2 * ("<0xE2>", "<0x9C>", "<0x93>"), "<0x0A>")
    assert "".join(stream(BYTE_FALLBACK, ids_of(BYTE_FALLBACK, "<0x0A>", "fox"), prompt_ids=prompt)) == "\nfox"


def test_a_prompt_that_ends_with_special_tokens_does_not_change_the_answer():
    word, unknown = ids_of(METASPACE, "▁a", "<unk>")
    assert "".join(stream(METASPACE, [word], prompt_ids=[word, *[unknown] * 9])) == " a"
    assert "".join(stream(METASPACE, [word], prompt_ids=[unknown] * 9)) == "a"


def test_special_tokens_are_written_as_they_are_declared():
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=True)])
    assert tokenizer.id_to_token(tokenizer.token_to_id("<end>")) == "▁<end>"
    assert Decoder(tokenizer).special_texts[tokenizer.token_to_id("<end>")] == "<end>"


def test_ids_outside_of_the_vocabulary_have_no_text():
    assert "".join(stream(METASPACE, [-1, *ids_of(METASPACE, "▁a"), 1_000_000])) in ("a", " a")


def test_bytes_that_never_become_a_character_are_passed_on_as_they_come():
    token_id = BYTE_LEVEL.token_to_id("Ģ")  # A byte that only continues a character.
    detokenizer = Detokenizer(Decoder(BYTE_LEVEL), (), ())
    pieces = [detokenizer.push(token_id) for _ in range(2000)]
    assert len(detokenizer._ids) <= 65
    assert "".join(pieces) == "\ufffd" * 1999
    assert detokenizer.flush() == "\ufffd"


def test_the_work_of_finding_stop_strings_does_not_grow_with_their_length():
    def cpu_s(length):
        """CPU time for text that begins like a stop string, piece by piece."""
        finder = StopFinder(["a" * length + "b", *(f"{number:02}" + "a" * length for number in range(15))])
        begun = time.process_time()
        for _ in range(5000):
            finder.push("aaaa")
        return time.process_time() - begun

    cpu_s(64)
    # Ten times as long: as much work for each character, where it was ten times as much or more.
    assert min(cpu_s(1000) for _ in range(2)) < 4 * min(cpu_s(100) for _ in range(2))


@settings(max_examples=300)
@given(st.lists(st.text("abc", max_size=4), max_size=10), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_text_before_the_first_stop_string_passes_however_it_is_divided(pieces, stop):
    finder = StopFinder(stop)
    passed = ""
    for piece in pieces:
        passed += finder.push(piece)
        if finder.found:
            break
    else:
        passed += finder.flush()
    text = "".join(pieces)
    first = min((i for s in stop if (i := text.find(s)) >= 0), default=-1)
    if first < 0:
        assert (passed, finder.found) == (text, False)
    else:
        assert finder.found
        # A shorter stop string may end earlier than a longer one that begins before it.
        assert text.startswith(passed)
        assert not any(s in passed for s in stop)


def test_text_that_may_become_a_stop_string_is_held_back_no_longer_than_needed():
    finder = StopFinder(["END."])
    assert finder.push("the E") == "the "
    assert finder.push("ND") == ""
    assert finder.push("ING") == "ENDING"
    assert finder.push(" END. more") == " "
    assert finder.found


@pytest.mark.parametrize(("stop", "before"), [(" upon", "Once upon a time, Once"), ("ime,", "Once upon a t")])
def test_stop_strings_count_only_where_they_end_after_min_tokens(stop, before):
    text = "Once upon a time, Once upon a day"
    ids = BYTE_LEVEL.encode(text).ids
    early = len(BYTE_LEVEL.encode("Once upon a time").ids)
    detokenizer = Detokenizer(Decoder(BYTE_LEVEL), (), [stop], min_tokens=early)
    passed = ""
    for token_id in ids:
        passed += detokenizer.push(token_id)
        if detokenizer.stopped:
            break
    assert passed == before


@pytest.mark.parametrize("stop", [" upon", "pon a", "time"])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_across_tokens_is_returned_only_on_request_and_nothing_behind_it(stop, is_included):
    text = "Once upon a time there was"
    detokenizer = Detokenizer(Decoder(BYTE_LEVEL), [], [stop], includes_stop=is_included)
    made = "".join(detokenizer.push(token_id) for token_id in BYTE_LEVEL.encode(text).ids)
    assert made == text[: text.index(stop) + len(stop) * is_included]
    assert detokenizer.stop_string == stop


@pytest.mark.parametrize(("includes_stop", "text"), [(False, "a</s>a"), (True, "a</s>a</s>")])
def test_a_special_token_that_ends_the_answer_is_written_only_on_request(includes_stop, text):
    decoder = Decoder(BYTE_FALLBACK)
    end, a = (BYTE_FALLBACK.token_to_id(token) for token in ("</s>", "a"))
    special = decoder.special_texts
    detokenizer = Detokenizer(decoder, [], [], kept=special)
    assembler = Assembler(detokenizer, Origin(None, [a]), (), includes_stop=includes_stop, end_ids=special.keys())
    chunk = assembler.take(TokenChunk([a, end, a, end], finish_reason="stop"), 0.0)
    assert (chunk.text, chunk.tokens.token_ids, chunk.origin.prompt_ids) == (text, [a, end, a, end], [a])


@pytest.mark.parametrize(("before", "text"), [((0xC3, 0xA9), "é"), ((0xC3,), "\ufffd"), ((), "")])
def test_a_special_token_that_is_kept_follows_all_text_before_it(before, text):
    decoder = Decoder(BYTE_FALLBACK)
    end, a = (BYTE_FALLBACK.token_to_id(token) for token in ("</s>", "a"))
    kept = decoder.special_ids(["</s>", "<plain>", "[X]"])
    assert kept == {end: "</s>"}
    ids = [a, *(BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in before), end, a, end]
    made = Detokenizer(decoder, [], [], kept=kept)
    assert [made.push(token_id) for token_id in ids][-3:] == [f"{text}</s>", "a", "</s>"]
    stopped = Detokenizer(decoder, [], ["a</s>"], kept=kept)
    assert "".join(stopped.push(token_id) for token_id in ids) == (f"a{text}</s>" if text else "")
    assert stopped.stop_string == "a</s>"
    plain = Detokenizer(decoder, [], [])
    assert "".join([plain.push(token_id) for token_id in ids] + [plain.flush()]) == f"a{text}a"
