"""Text comes as soon as it is certain: whole characters, nothing of a stop string, nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.transformer.detokenizer import Detokenizer, StopFinder

CORPUS = ["Once upon a time there was a dog.", "Zoë ate naïve crêpes 🥞 in 東京 😀😃 and sang ¡olé!"] * 20


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace():
    """Writes a space before the first word and drops it on decoding, as SentencePiece's models do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BYTE_LEVEL, METASPACE = byte_level(), metaspace()


def stream(tokenizer, ids, stop=(), prompt_ids=()):
    detokenizer = Detokenizer(tokenizer, prompt_ids, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            return pieces
    return [*pieces, detokenizer.flush()]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text_and_never_split_a_character(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_whole():
    text = "a🦄b"
    ids = BYTE_LEVEL.encode(text).ids
    assert len(ids) > 3
    assert [piece for piece in stream(BYTE_LEVEL, ids) if piece] == ["a", "🦄", "b"]


def test_a_character_cut_off_at_the_end_is_marked():
    ids = BYTE_LEVEL.encode("a🦄").ids[:-1]
    assert "".join(stream(BYTE_LEVEL, ids)).startswith("a\ufffd")


def test_the_space_between_prompt_and_output_is_kept():
    prompt, whole = METASPACE.encode("Once upon").ids, METASPACE.encode("Once upon a time").ids
    assert whole[: len(prompt)] == prompt
    assert "".join(stream(METASPACE, whole[len(prompt) :], prompt_ids=prompt)) == " a time"
    assert "".join(stream(METASPACE, METASPACE.encode("a time").ids)) == "a time"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_what_passes_is_the_text_before_the_first_stop_string_however_it_is_cut(pieces, stop):
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


def test_text_that_may_become_a_stop_string_is_held_back_only_so_long():
    finder = StopFinder(["END."])
    assert finder.push("the E") == "the "
    assert finder.push("ND") == ""
    assert finder.push("ING") == "ENDING"
    assert finder.push(" END. more") == " "
    assert finder.found


def test_stop_strings_count_only_after_min_tokens():
    text = "Once upon a time, Once upon a day"
    ids = BYTE_LEVEL.encode(text).ids
    early = len(BYTE_LEVEL.encode("Once upon a time").ids)
    detokenizer = Detokenizer(BYTE_LEVEL, (), [" upon"], min_tokens=early)
    passed = ""
    for token_id in ids:
        passed += detokenizer.push(token_id)
        if detokenizer.stopped:
            break
    assert passed == "Once upon a time, Once"


@pytest.mark.parametrize("stop", [" upon", "pon a", "time"])
def test_a_stop_string_across_tokens_is_not_returned(stop):
    text = "Once upon a time there was"
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, stop=[stop])
    assert "".join(pieces) == text[: text.index(stop)]
