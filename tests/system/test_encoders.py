"""Texts to embeddings, classes, scores and ranks: the answers of OpenAI's and vLLM's paths are those of the models."""

import base64
import json

import numpy as np
import pytest
import pytest_asyncio
import torch

from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.system.calls import rest
from tests.system.payload_log import records

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


def saved(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / kind
    return save_random_encoder(kind, folder), save_words_tokenizer(folder, *WORDS), folder


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory, embedder, classifier, cross_encoder):
    without_tokenizer = tmp_path_factory.mktemp("models") / "bert"
    save_random_encoder("bert", without_tokenizer)
    models = {
        "storyteller": "models/storyteller",
        "embedder": embedder[2],
        "ids-embedder": without_tokenizer,
        "classifier": classifier[2],
        "cross-encoder": cross_encoder[2],
        "identity": "models/identity",
    }
    async with stacks.use(models=",".join(f"{name}={where}" for name, where in models.items())) as started:
        yield started


async def post(stack, path, body, **headers):
    answer = await rest(stack.gateway, "POST", path, body, **headers)
    assert answer.status == 200, answer.body
    return answer


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
    "long ids": ({"input": [5] * 100}, 400, "input 0: the prompt has 100 tokens"),
    "unknown id": ({"input": [5, 5000]}, 400, "5000 is outside of 0 to 119"),
    "empty text": ({"input": ["fox", ""]}, 400, "input 1: the prompt is empty"),
    "empty ids": ({"input": [[5], []]}, 400, "input 1: the prompt is empty"),
    "too many": ({"input": [[5]] * 2049}, 400, "has 2049 items, at most 2048 are allowed"),
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
    assert (record.status, record.protocol) == ("OK", "millrace.rest.v1.OpenAI/Embeddings")
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
    assert (record.status, record.protocol) == ("OK", "millrace.rest.v1.OpenAI/Classify")
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


async def test_scores_of_an_embedding_model_are_cosines(stack, embedder):
    model, tokenizer, _ = embedder
    texts = ["a fox", "the bird sat", "the fox sat on a mat"]
    with torch.no_grad():
        vectors = [
            model(**row).last_hidden_state.mean(1)[0] for row in rows_of(tokenizer, *((text,) for text in texts))
        ]
    wanted = [float(torch.cosine_similarity(vectors[0], vector, dim=0)) for vector in vectors[1:]]
    body = {"model": "embedder", "text_1": texts[0], "text_2": texts[1:]}
    answer = (await post(stack, "/score", body)).json
    np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted, rtol=1e-4, atol=1e-5)


SCORES = {
    "labels": ("/score", {"model": "classifier", "text_1": "a", "text_2": "the"}, "3 labels"),
    "classes of an embedder": ("/classify", {"model": "embedder", "input": "a"}, "makes no classes of text"),
    "embeddings of a classifier": ("/v1/embeddings", {"model": "classifier", "input": "a"}, "makes no embeddings"),
    "generation": ("/rerank", {"model": "storyteller", "query": "a", "documents": ["a"]}, "makes no scores"),
    "numbers": ("/score", {"model": "cross-encoder", "text_1": ["a", "a"], "text_2": ["a"]}, "give one, or as many"),
    "long": ("/v2/rerank", {"model": "cross-encoder", "query": "a", "documents": ["a", "fox " * 70]}, "documents 1: "),
    "none": ("/rerank", {"model": "cross-encoder", "query": "a", "documents": []}, "a string or a list of strings"),
    "many": ("/rerank", {"model": "cross-encoder", "query": "a", "documents": ["a"] * 2049}, "at most 2048"),
    "types": ("/rerank", {"model": "cross-encoder", "query": "a", "documents": ["a", 1]}, "a list of strings"),
    "cut": ("/rerank", {"query": "a", "documents": ["a"], "truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
}


@pytest.mark.parametrize("case", SCORES)
async def test_impossible_scores_are_refused(stack, case):
    path, body, text = SCORES[case]
    answer = await rest(stack.gateway, "POST", path, body)
    assert answer.status == 400
    assert text in answer.json["error"]["message"]
