"""Answers in OpenAI's two shapes, and the texts and bytes of single tokens in them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models

from headrace.oip.prompt_scores import read_prompt
from headrace_protos.headrace_pb2 import Usage
from headrace_protos.steps_pb2 import PromptScores
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat, usage_of
from headrace_transformer.frontends.openai.generation_requests import ChatCompletionRequest, CompletionRequest
from headrace_transformer.text.token_bytes import TokenBytes
from headrace_transformer.text.tokenizer import TextTokenizer
from tests.support.text_chunks import text_chunk

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
INF = float("inf")


@pytest.fixture(scope="module")
def tokenizer():
    with ThreadPoolExecutor(1) as pool:
        yield TextTokenizer("storyteller", STORYTELLER, pool)


@pytest.fixture(scope="module")
def model(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer)


def completion(prompts="Once", **fields):
    return CompletionFormat(CompletionRequest(prompt=prompts, **fields))


def chat(**fields):
    return ChatFormat(ChatCompletionRequest(messages=[{"role": "user", "content": "Hello."}], **fields))


def word_tokenizer(vocabulary, decoder):
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    made.decoder = decoder
    return made


@pytest.mark.parametrize("text", ["Once upon a time", "naïve crêpes 🥞 in 東京", " two  spaces\n"])
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer, text):
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokenizer.token_bytes.of, ids)) == text.encode()


def test_special_tokens_have_their_names_and_unknown_ids_no_text(tokenizer):
    assert tokenizer.token_bytes.of(2) == b"</s>"
    assert tokenizer.token_bytes.of(10**6) == b""


def test_bytes_in_other_vocabularies_are_found_too():
    replaced = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = TokenBytes(word_tokenizer(["<unk>", "▁Once", "a", "▁upon", "<0xE2>"], replaced))
    assert [tokens.of(i) for i in range(1, 5)] == [b" Once", b"a", b" upon", b"\xe2"]
    pieces = TokenBytes(word_tokenizer(["[UNK]", "walk", "##ing", "on"], decoders.WordPiece("##", False)))
    assert [pieces.of(i) for i in range(1, 4)] == [b" walk", b"ing", b" on"]


def ids_of(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_log_probabilities_of_a_completion(tokenizer, model):
    ids = ids_of(tokenizer, "a🦄b")
    assert len(ids) > 3
    other = ids_of(tokenizer, "x")[0]
    values = [-0.5 * i for i in range(len(ids))]
    tops = [[(token_id, value), (other, -INF)] for token_id, value in zip(ids, values, strict=True)]
    whole = text_chunk("a🦄b", ids, "length", model=model, logprobs=values, top_logprobs=tops)
    choice = completion(logprobs=1).whole(1, whole)
    logprobs = choice["logprobs"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (1, "a🦄b", "length")
    assert (logprobs["tokens"][0], logprobs["tokens"][-1]) == ("a", "b")
    assert logprobs["tokens"][1].startswith("bytes:\\xf0")
    assert logprobs["token_logprobs"] == values
    assert logprobs["top_logprobs"][0] == {"a": 0.0, "x": -9999.0}
    assert (logprobs["text_offset"][0], logprobs["text_offset"][1], logprobs["text_offset"][-1]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("skips", "text", "offsets"), [(True, "Once upon", [0, 4, 4]), (False, "Once</s> upon", [0, 4, 8])]
)
def test_offsets_count_special_tokens_where_they_are_text(tokenizer, model, skips, text, offsets):
    once, upon = ids_of(tokenizer, "Once upon")
    ids = [once, tokenizer.backend.token_to_id("</s>"), upon]
    whole = text_chunk(text, ids, "length", model=model, logprobs=[-1.0] * 3)
    choice = completion(logprobs=0, skip_special_tokens=skips).whole(0, whole)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_offsets_count_the_special_tokens_that_an_echoed_prompt_names(tokenizer, model):
    ids = tokenizer.backend.encode("</s>🦄").ids
    scores = read_prompt(PromptScores(chosen=[-1.0] * (len(ids) - 1)), 0)
    made = text_chunk("", [], "length", model=model, prompt_ids=ids, prompt=scores)
    offsets = completion("</s>🦄", echo=True, logprobs=0).whole(0, made)["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 0, 4]


def test_offsets_of_an_echo_are_places_in_a_text_whose_first_word_has_lost_its_space():
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend = word_tokenizer(["<unk>", "▁The", "▁cat", "▁sat", "</s>"], decoder)
    backend.add_special_tokens(["<s>", "</s>"])
    special = {backend.token_to_id(text): text for text in ("<s>", "</s>")}
    tokens = SimpleNamespace(token_bytes=TokenBytes(backend), decoder=SimpleNamespace(special_texts=special))
    sentence = SimpleNamespace(tokenizer=tokens)
    scores = read_prompt(PromptScores(chosen=[-1.0] * 2), 0)
    start = backend.token_to_id("<s>")
    made = text_chunk(" sat", [3], model=sentence, logprobs=[-1.0], prompt_ids=[start, 1, 2], prompt=scores)
    choice = completion("The cat", echo=True, logprobs=0).whole(0, made)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("The cat sat", [0, 0, 3, 7])


def test_an_echo_of_ids_is_decoded_once_for_all_choices(tokenizer, model):
    ids, decoded = ids_of(tokenizer, "Once upon"), []
    backend = SimpleNamespace(decode=lambda ids, **_: decoded.append(ids) or tokenizer.backend.decode(ids))
    shape = completion([ids], echo=True, n=3)
    made = text_chunk(" a", [5], model=SimpleNamespace(tokenizer=SimpleNamespace(backend=backend)), prompt_ids=ids)
    assert [shape.whole(index, made)["text"] for index in range(3)] == ["Once upon a"] * 3
    assert decoded == [ids]


def test_a_size_counts_log_probabilities_and_echoed_ids():
    scores = read_prompt(PromptScores(chosen=[-1.0] * 2), 0)
    tops = [[(5, -1.0), (6, -2.0)]] * 4
    made = text_chunk("a", [5] * 4, logprobs=[-1.0] * 4, top_logprobs=tops, prompt_ids=[7, 8, 9], prompt=scores)
    assert (chat(logprobs=True).size(made, True), completion([[7, 8, 9]], echo=True).size(made, True)) == (14, 17)
    assert (completion(echo=True).size(text_chunk("a", [5]), False), chat().size(text_chunk("a", [5]), True)) == (0, 0)


def test_log_probabilities_of_a_message(tokenizer, model):
    once, upon = ids_of(tokenizer, "Once upon")
    top = [[(once, -1.0), (upon, -2.0)]]
    made = text_chunk("Once", [once], "stop", model=model, logprobs=[-1.0], top_logprobs=top)
    [entry] = chat(logprobs=True).whole(0, made)["logprobs"]["content"]
    own = {"token": "Once", "logprob": -1.0, "bytes": list(b"Once")}
    other = {"token": " upon", "logprob": -2.0, "bytes": list(b" upon")}
    assert entry == own | {"top_logprobs": [own, other]}


def test_log_probabilities_are_absent_unless_requested():
    made = text_chunk("Once", [5])
    assert completion().whole(0, made)["logprobs"] is None
    assert chat().chunk(0, made, True) == {
        "index": 0,
        "delta": {"role": "assistant", "content": "Once"},
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
    assert chat().chunk(0, made, False)["delta"] == {"content": "Once"}


def test_an_echo_comes_before_each_choice_once(tokenizer, model):
    written = completion(prompts=[ids_of(tokenizer, "One"), ids_of(tokenizer, "Two")], echo=True, n=2)
    made = text_chunk(" more", [5], model=model)
    assert [written.chunk(i, made, True)["text"] for i in range(4)] == ["One more", "One more", "Two more", "Two more"]
    assert written.chunk(0, made, False)["text"] == " more"


def test_a_prompt_and_what_was_cached_of_it_count_once_for_all_its_choices():
    usages = [Usage(prompt_tokens=tokens, cached_tokens=1, completion_tokens=10) for tokens in (5, 5, 7, 7)]
    assert usage_of([text_chunk(reason="stop", usage=usage) for usage in usages], 2) == {
        "prompt_tokens": 12,
        "completion_tokens": 40,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
