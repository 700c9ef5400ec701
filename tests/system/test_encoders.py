"""Texts to embeddings, classes, scores and ranks: the answers of OpenAI's and vLLM's paths are those of the models."""

import base64
import json

import numpy as np
import pytest
import pytest_asyncio
import torch

from tests.random_encoders import save_random_encoder, save_random_type, save_words_tokenizer
from tests.support.lazy import library, parts
from tests.system.calls import post, records, rest

WORDS = ("the", "fox", "sat", "on", "a", "mat", "bird")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """An embedding model, its tokenizer, and the folder of both."""
    return saved("bert", tmp_path_factory)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """As `embedder`, a classifier of three labels."""
    return saved("bert-classifier", tmp_path_factory)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """As `embedder`, a classifier of pairs with one label."""
    return saved("cross-encoder", tmp_path_factory)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A model of sentence-transformers with prompts, whose vectors can be shortened, and its folder."""
    inner, folder = tmp_path_factory.mktemp("inner"), tmp_path_factory.mktemp("sentences")
    save_random_type("bert", inner, is_matryoshka=True)
    save_words_tokenizer(inner, *WORDS, "query", "passage")
    modules = [parts.Transformer(str(inner), max_seq_length=9), parts.Pooling(32, "weightedmean"), parts.Normalize()]
    prompts = {"query": "query a ", "document": "passage on ", "plain": ""}
    library.SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name="query").save(str(folder))
    return library.SentenceTransformer(str(folder)), folder


@pytest.fixture(scope="module")
def ranker(tmp_path_factory, cross_encoder):
    """A cross-encoder as sentence-transformers saves it, and its folder."""
    folder = tmp_path_factory.mktemp("ranker")
    library.CrossEncoder(str(cross_encoder[2]), activation_fn=torch.nn.Identity()).save(str(folder))
    return library.CrossEncoder(str(folder)), folder


def damaged(kind, tmp_path_factory):
    """The folder of a model that gives no number for a text with a bird."""
    model, _, folder = saved(kind, tmp_path_factory)
    with torch.no_grad():
        model.get_input_embeddings().weight[5 + WORDS.index("bird")] = torch.nan
    model.save_pretrained(folder)
    return folder


def saved(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / kind
    return save_random_encoder(kind, folder), save_words_tokenizer(folder, *WORDS), folder


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory, embedder, classifier, cross_encoder, sentences, ranker):
    without_tokenizer = tmp_path_factory.mktemp("models") / "bert"
    save_random_encoder("bert", without_tokenizer)
    models = {
        "storyteller": "models/storyteller",
        "embedder": embedder[2],
        "ids-embedder": without_tokenizer,
        "classifier": classifier[2],
        "cross-encoder": cross_encoder[2],
        "identity": "models/identity",
        "sentences": sentences[1],
        "ranker": ranker[1],
        "damaged-embedder": damaged("bert", tmp_path_factory),
        "damaged-ranker": damaged("cross-encoder", tmp_path_factory),
    }
    async with stacks.use(models=",".join(f"{name}={where}" for name, where in models.items())) as started:
        yield started


async def test_embeddings_are_those_of_the_model(stack, embedder):
    model, tokenizer, _ = embedder
    texts = ["the fox sat on a mat", "a bird", "the bird sat"]
    rows = [tokenizer(text).input_ids for text in texts]
    with torch.no_grad():
        wanted = [model(torch.tensor([row])).last_hidden_state.mean(1)[0].numpy() for row in rows]
    by_text = (await post(stack, "/v1/embeddings", {"model": "embedder", "input": texts})).json
    assert by_text["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, rows)))
    by_ids = (await post(stack, "/openai/v1/embeddings", {"model": "embedder", "input": rows})).json
    # The inputs of a batch depend on the time of their arrival, and so do the last bits of a number.
    vectors = [[row.pop("embedding") for row in answer["data"]] for answer in (by_ids, by_text)]
    assert by_ids == by_text
    np.testing.assert_allclose(*vectors, rtol=1e-4, atol=1e-5)
    body = {"model": "embedder", "input": texts, "encoding_format": "base64"}
    as_base64 = (await post(stack, "/v1/embeddings", body)).json
    for i, vector in enumerate(wanted):
        assert by_text["data"][i]["index"] == i
        np.testing.assert_allclose(vectors[1][i], vector, rtol=1e-4, atol=1e-5)
        packed = np.frombuffer(base64.b64decode(as_base64["data"][i]["embedding"]), "<f4")
        np.testing.assert_allclose(packed, vectors[1][i], rtol=1e-4, atol=1e-5)


async def embed(stack, texts, **fields):
    body = {"model": "sentences", "input": texts, **fields}
    rows = (await post(stack, "/v1/embeddings", body)).json["data"]
    return np.array([row["embedding"] for row in rows])


TEXTS = ["the fox sat", "a bird", "on a mat"]


async def test_embeddings_have_the_prompts_and_sizes_that_the_request_names(stack, sentences):
    model, _ = sentences
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(await embed(stack, TEXTS), model.encode(TEXTS), **close)
    plain = await embed(stack, TEXTS, prompt_name="plain")
    np.testing.assert_allclose(plain, model.encode(TEXTS, prompt_name="plain"), **close)
    passages = await embed(stack, TEXTS, input_type="passage")
    np.testing.assert_allclose(passages, model.encode_document(TEXTS), **close)
    short = model.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(await embed(stack, TEXTS, dimensions=8), short, **close)
    long = ["the fox sat on a mat the bird sat on a fox"]
    np.testing.assert_allclose(await embed(stack, long, truncate_prompt_tokens=-1), model.encode(long), **close)
    body = {"model": "sentences", "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = (await post(stack, "/rerank", body)).json["results"]
    wanted = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS[1:]))[0]
    for result in ranked:
        assert result["relevance_score"] == pytest.approx(float(wanted[result["index"]]), abs=1e-4)
    body = {"model": "sentences", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    scores = [one["score"] for one in (await post(stack, "/score", body)).json["data"]]
    np.testing.assert_allclose(scores, model.similarity(*(model.encode(t) for t in (TEXTS[:1], TEXTS[1:])))[0], **close)


NOT_FINITE = {
    "floats": ("/v1/embeddings", {"model": "damaged-embedder", "input": ["a fox", "a bird"]}),
    "cosines": ("/score", {"model": "damaged-embedder", "text_1": "a fox", "text_2": ["a mat", "a bird"]}),
    "scores": ("/score", {"model": "damaged-ranker", "text_1": "a fox", "text_2": ["a mat", "a bird"]}),
    "tensors": (
        "/v2/models/damaged-embedder/infer",
        {"inputs": [{"name": "input_ids", "shape": [1], "datatype": "INT64", "data": [5 + WORDS.index("bird")]}]},
    ),
}


@pytest.mark.parametrize("case", NOT_FINITE)
async def test_numbers_that_are_not_finite_are_an_error(stack, case):
    path, body = NOT_FINITE[case]
    answer = await rest(stack.gateway, "POST", path, body)
    assert answer.status == 500, answer.body
    assert b"numbers that are not finite" in answer.body


async def test_a_thousand_inputs_are_answered_in_order(stack):
    inputs = [[5 + i % 7, 5 + i // 7 % 7, 5 + i // 49 % 7] for i in range(1000)]
    many = (await post(stack, "/v1/embeddings", {"model": "embedder", "input": inputs})).json["data"]
    assert [row["index"] for row in many] == list(range(1000))
    for i in (0, 63, 64, 999):
        one = (await post(stack, "/v1/embeddings", {"model": "embedder", "input": inputs[i]})).json["data"][0]
        np.testing.assert_allclose(many[i]["embedding"], one["embedding"], rtol=1e-4, atol=1e-5)


EMBEDDINGS = {
    "generation model": ({"model": "storyteller"}, 400, "generates text and makes no embeddings"),
    "no tokenizer": ({"model": "ids-embedder"}, 400, "makes no embeddings of text; call it by ModelInfer"),
    "Python model": ({"model": "identity"}, 400, "makes no embeddings of text"),
    "unknown model": ({"model": "nobody"}, 404, "no model 'nobody'"),
    "long": ({"input": ["fox", "fox " * 70]}, 400, "input 1: the prompt has 72 tokens"),
    "unknown id": ({"input": [5, 5000]}, 400, "5000 is outside of 0 to 119"),
    "empty text": ({"input": ["fox", ""]}, 400, "input 1: the prompt is empty"),
    "too many": ({"input": [[5]] * 2049}, 400, "has 2049 items, at most 2048 are allowed"),
    "prompt": ({"model": "sentences", "prompt_name": "x"}, 400, "has no prompt 'x'; it has query, document, plain"),
    "both": ({"model": "sentences", "prompt_name": "plain", "input_type": "query"}, 400, "not both"),
    "prompt of ids": ({"model": "sentences", "input": [5], "prompt_name": "query"}, 400, "the input is token ids"),
    "long for sentence-transformers": ({"model": "sentences", "input": "fox " * 8}, 400, "input 0: the prompt has 12"),
    "shorter": ({"dimensions": 8}, 400, "do not say that its vectors can be shortened"),
    "more": ({"model": "sentences", "dimensions": 33}, 400, "dimensions 33 is not one of the model's: 1 to 32"),
    "no room": ({"truncate_prompt_tokens": 1}, 400, "input 0: 1 tokens have no room for the model's 2 special tokens"),
    "deadline": ({"input": [[5]] * 2048}, 504, "the deadline passed"),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
async def test_impossible_embeddings_are_refused(stack, case):
    change, status, text = EMBEDDINGS[case]
    headers = {"x_timeout_ms": "20"} if case == "deadline" else {}
    body = {"model": "embedder", "input": "fox", **change}
    answer = await rest(stack.gateway, "POST", "/v1/embeddings", body, x_request_id=f"embeddings-{case}", **headers)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert text in answer.json["error"]["message"]
    await post(stack, "/v1/embeddings", {"model": "embedder", "input": "fox"})


async def test_a_request_for_embeddings_leaves_one_record(stack):
    body = {"model": "embedder", "input": ["the fox", "a bird"]}
    await post(stack, "/v1/embeddings", body, x_request_id="two-inputs")
    (record,) = await records(stack.gateway, request_id="two-inputs")
    assert (record.status, record.protocol) == ("OK", "headrace.rest.v1.OpenAI/Embeddings")
    assert json.loads(record.prompt) == body["input"]
    assert record.usage.prompt_tokens == 8


def rows_of(tokenizer, *texts):
    return [tokenizer(*pair, return_tensors="pt") for pair in texts]


async def test_classes_are_those_of_the_model(stack, classifier):
    model, tokenizer, _ = classifier
    texts = ["the fox sat", "a bird"]
    with torch.no_grad():
        logits = [model(**row).logits[0] for row in rows_of(tokenizer, *((text,) for text in texts))]
    answer = (await post(stack, "/classify", {"model": "classifier", "input": texts}, x_request_id="classes")).json
    for index, (one, wanted) in enumerate(zip(answer["data"], logits, strict=True)):
        np.testing.assert_allclose(one.pop("probs"), wanted.softmax(-1), rtol=1e-4, atol=1e-5)
        label = model.config.id2label[int(wanted.argmax())]
        assert one == {"index": index, "label": label, "num_classes": 3}
    assert answer["usage"]["prompt_tokens"] == 9
    body = {"model": "classifier", "input": tokenizer(texts[0]).input_ids, "use_activation": False}
    (raw,) = (await post(stack, "/classify", body)).json["data"]
    np.testing.assert_allclose(raw["probs"], logits[0], rtol=1e-4, atol=1e-5)
    (record,) = await records(stack.gateway, request_id="classes")
    assert (record.status, record.protocol) == ("OK", "headrace.rest.v1.OpenAI/Classify")
    assert json.loads(record.prompt) == texts


async def test_scores_and_ranks_are_those_of_a_cross_encoder(stack, cross_encoder):
    model, tokenizer, _ = cross_encoder
    query, documents = "a fox", ["the bird sat", "the fox sat on a mat", "a mat"]
    with torch.no_grad():
        rows = rows_of(tokenizer, *((query, document) for document in documents))
        wanted = [float(model(**row).logits.sigmoid()) for row in rows]
    assert len({round(value, 3) for value in wanted}) == 3
    named = {"model": "cross-encoder"}
    answer = (await post(stack, "/v1/score", {**named, "text_1": query, "text_2": documents})).json
    np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted, rtol=1e-4, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(row.input_ids.numel() for row in rows)
    body = {**named, "queries": [query, query], "documents": documents[:2]}
    answer = (await post(stack, "/score", body)).json
    np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted[:2], rtol=1e-4, atol=1e-5)
    order = sorted(range(3), key=lambda index: -wanted[index])
    body = {**named, "query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = (await post(stack, path, body)).json["results"]
        assert [one["index"] for one in ranked] == order
        assert [one["document"]["text"] for one in ranked] == [documents[index] for index in order]
    (best,) = (await post(stack, "/rerank", {**body, "top_n": 1, "return_documents": False})).json["results"]
    assert best == {"index": order[0], "relevance_score": pytest.approx(max(wanted), rel=1e-4)}


SCORES = {
    "labels": ("/score", {"model": "classifier", "text_1": "a", "text_2": "the"}, "3 labels"),
    "embeddings of a classifier": ("/v1/embeddings", {"model": "classifier", "input": "a"}, "makes no embeddings"),
    "generation": ("/rerank", {"model": "storyteller", "query": "a", "documents": ["a"]}, "makes no scores"),
    "numbers": ("/score", {"model": "cross-encoder", "text_1": ["a", "a"], "text_2": ["a"]}, "give one, or as many"),
    "long": ("/v2/rerank", {"model": "cross-encoder", "query": "a", "documents": ["a", "fox " * 70]}, "documents 1: "),
    "many": ("/rerank", {"model": "cross-encoder", "query": "a", "documents": ["a"] * 2049}, "at most 2048"),
    "cut": ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 8}, "max_tokens_per_doc"),
    "prompt": ("/score", {"model": "ranker", "text_1": "a", "text_2": "a", "prompt_name": "x"}, "'x'; it has none"),
}


@pytest.mark.parametrize("case", SCORES)
async def test_impossible_scores_are_refused(stack, case):
    path, body, text = SCORES[case]
    answer = await rest(stack.gateway, "POST", path, body)
    assert answer.status == 400
    assert text in answer.json["error"]["message"]
