"""Classification and embeddings: batches equal the model's own answers; unsupported models and requests are refused."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from headrace.errors import InvalidRequestError, RequestFailedError, StartupError
from headrace.models.kinds import ModelKind, kind_of
from headrace.models.sources import ModelSource
from headrace.oip.model_description import INPUT_IDS, config_of, metadata_of
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_predictor.repository.loading import build_here, fetch_model
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.tensor_models.encoder_model import ATTENTION_MASK, pad
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.random_encoders import ENCODERS, VOCABULARY, save_random_encoder, save_random_type


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each kind of encoder: its folder and the model itself."""
    root = tmp_path_factory.mktemp("encoders")
    return {kind: (root / kind, save_random_encoder(kind, root / kind)) for kind in ENCODERS}


@pytest.fixture
def serve():
    """Loads a folder as the predictor does; the models end with the test."""
    loaded = []

    def start(folder, **settings):
        settings = {"batch_rows": 8, "batch_delay_ms": 20, "device": "cpu", **settings}
        source = ModelSource("m", str(folder))
        fetched = fetch_model(source, lambda _: None)
        loaded.append(build_here(source, fetched, PredictorSettings(**settings), lambda _: None))
        return loaded[-1]

    yield start
    for model in loaded:
        model.close()


def ids_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, length)


def request(ids, datatype="INT64", **more):
    message = ModelInferRequest(model_name="m", id="r")
    add_input(message, Tensor("input_ids", datatype, np.asarray(ids, dtype=datatype.lower())))
    for name, values in more.items():
        add_input(message, Tensor(name, "INT64", np.asarray(values, dtype=np.int64)))
    return message


async def answer(model, message):
    (tensor,) = decode_outputs(await model.infer(message)).values()
    return tensor.array


def reference(model, ids, mask=None):
    """The model's own output for one row."""
    with torch.no_grad():
        ids = torch.tensor(np.atleast_2d(ids))
        mask = torch.ones_like(ids) if mask is None else torch.tensor(np.atleast_2d(mask))
        output = model(input_ids=ids, attention_mask=mask)
    return output.logits.numpy() if hasattr(output, "logits") else output.last_hidden_state[0].numpy()


LENGTHS = [3, 14, 9, 1, 30, 40, 12, 16, 25, 5]


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if "classifier" in kind])
async def test_a_batch_of_mixed_lengths_classifies_as_the_model_alone_does(saved, serve, kind):
    folder, model = saved[kind]
    served = serve(folder)
    await served.warm_up()
    rows = [ids_of(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = await asyncio.gather(*(answer(served, request(ids)) for ids in rows))
    assert served.statistics.steps < 1 + len(rows)
    for ids, logits in zip(rows, answers, strict=True):
        assert logits.shape == (1, 3)
        np.testing.assert_allclose(logits, reference(model, ids), rtol=1e-4, atol=1e-5)
    # Else the comparison would hold for a model with the same output for every input.
    assert np.ptp(np.concatenate(answers), axis=0).min() > 0.1
    assert (
        config_of(served.name, served.description).parameters["pads_rows"].string_value
        == str("without" not in kind).lower()
    )


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 12,
}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 12}),
        ("modernbert", {"rope_parameters": {"full_attention": LONG, "sliding_attention": LONG}}),
    ],
)
async def test_positions_scaled_by_the_longest_row_are_each_rows_own(tmp_path, serve, kind, scaling):
    model = save_random_type(kind, tmp_path, AutoModelForSequenceClassification, **scaling)
    served = serve(tmp_path)
    rows = [ids_of(length, seed) for seed, length in enumerate((5, 12, 13, 16))]
    padded = request(np.pad(rows[0], (0, 9)), attention_mask=[1] * 5 + [0] * 9)
    answers = await asyncio.gather(*(answer(served, message) for message in [*map(request, rows), padded]))
    assert served.statistics.steps < len(rows)
    for ids, logits in zip([*rows, rows[0]], answers, strict=True):
        np.testing.assert_allclose(logits, reference(model, ids), rtol=1e-4, atol=1e-5)


async def test_a_vector_that_is_not_finite_fails_its_request_only(tmp_path, serve):
    model = save_random_encoder("bert", tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[77] = torch.nan
    model.save_pretrained(tmp_path)
    served = serve(tmp_path)
    rows = [ids_of(9, seed) % 70 for seed in range(4)] + [np.array([5, 77, 6])]
    *vectors, error = await asyncio.gather(*(answer(served, request(row)) for row in rows), return_exceptions=True)
    assert isinstance(error, RequestFailedError)
    assert "embedding of these ids has numbers that are not finite" in error.message
    assert served.statistics.steps < len(rows)
    for row, vector in zip(rows, vectors, strict=False):
        np.testing.assert_allclose(vector[0], reference(model, row).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bart", "t5"])
async def test_a_classifier_with_a_decoder_takes_rows_of_several_ends(tmp_path, serve, kind):
    model = save_random_type(kind, tmp_path, AutoModelForSequenceClassification)
    served = serve(tmp_path)
    rows = [[5, 6, 3], [7, 3, 8, 3, 9], [3], [*ids_of(20), 3]]  # 3 ends a text.
    answers = await asyncio.gather(*(answer(served, request(ids)) for ids in rows))
    for ids, logits in zip(rows, answers, strict=True):
        np.testing.assert_allclose(logits, reference(model, ids), rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="a row lacks the id 3, by which the model reads a text's end"):
        await served.infer(request([5, 6]))


async def test_requests_of_several_rows_masks_and_types_get_their_own_answers(saved, serve):
    folder, model = saved["bert-classifier"]
    served = serve(folder)
    ids = np.stack([ids_of(9, seed) for seed in range(3)])
    mask = np.array([[1] * 9, [1] * 4 + [0] * 5, [0] * 2 + [1] * 7])
    types = np.array([[0] * 5 + [1] * 4] * 3)
    plain, masked, typed, narrow = await asyncio.gather(
        answer(served, request(ids)),
        answer(served, request(ids, attention_mask=mask)),
        answer(served, request(ids[0], token_type_ids=types[0])),
        answer(served, request(ids[:, :2], "INT32")),
    )
    for i in range(3):
        np.testing.assert_allclose(plain[i : i + 1], reference(model, ids[i]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(masked[i : i + 1], reference(model, ids[i], mask[i]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(narrow[i : i + 1], reference(model, ids[i, :2]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        tensors = {"input_ids": torch.tensor(ids[:1]), "token_type_ids": torch.tensor(types[:1])}
        np.testing.assert_allclose(typed, model(**tensors).logits.numpy(), rtol=1e-4, atol=1e-5)


REFUSALS = [
    (lambda: ModelInferRequest(model_name="m"), "input 'input_ids' is missing"),
    (lambda: request([VOCABULARY]), "input_ids: 120 is outside of 0 to 119"),
    (lambda: request([-1]), "input_ids: -1 is outside"),
    (lambda: request([]), r"must have shape \[N\] or \[B, N\] and hold ids, not \[0\]"),
    (lambda: request([[[1]]]), "must have shape"),
    (lambda: request(ids_of(67)), "67 tokens a row, the model takes 66"),
    (lambda: request(np.ones((9, 2))), "a batch of 9, at most 8 are allowed"),
    (lambda: request([5, 6], attention_mask=[1]), r"must have the shape \[2\]"),
    (lambda: request([5, 6], attention_mask=np.ones(600)), "attention_mask has 600 tokens a row"),
    (lambda: request([5, 6], attention_mask=[1, 2]), "attention_mask: 2 is outside of 0"),
    (lambda: request([5, 6], attention_mask=[0, 0]), "attention_mask hides every token"),
    (lambda: request([5, 6], token_type_ids=[0, 2]), "token_type_ids: 2 is outside"),
    (lambda: request([5], positions=[0]), "unknown input 'positions'; the model takes input_ids"),
]  # fmt: skip


async def test_unsupported_inputs_are_refused(saved, serve):
    served = serve(saved["bert-classifier"][0])
    for make, text in REFUSALS:
        with pytest.raises(InvalidRequestError, match=text):
            await served.infer(make())
    assert served.statistics.steps == 0


async def test_other_types_and_outputs_are_refused(saved, serve):
    served = serve(saved["bert"][0])
    message = ModelInferRequest(model_name="m")
    add_input(message, Tensor("input_ids", "FP32", np.ones(3, np.float32)))
    with pytest.raises(InvalidRequestError, match="must be INT64 or INT32, not FP32"):
        await served.infer(message)
    message = request([5])
    message.outputs.add(name="logits")
    with pytest.raises(InvalidRequestError, match="unknown output 'logits'; the model gives embedding"):
        await served.infer(message)


@pytest.mark.parametrize(("kind", "length"), [("bert", 66), ("roberta", 64), ("t5-encoder", 512)])
async def test_the_longest_row_is_served_and_one_longer_is_refused(saved, serve, kind, length):
    served = serve(saved[kind][0])
    assert (await answer(served, request(ids_of(length)))).shape == (1, 32)
    with pytest.raises(InvalidRequestError, match=f"the model takes {length}"):
        await served.infer(request(ids_of(length + 1)))


async def test_metadata_and_configuration_have_tensors_and_labels(saved, serve):
    served = serve(saved["bert-classifier"][0])
    metadata, config = metadata_of(served.name, ["1"], served.description), config_of(served.name, served.description)
    assert [(t.name, t.datatype) for t in metadata.inputs] == [
        (name, "INT64") for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("logits", "FP32", [-1, 3])]
    assert [tensor.optional for tensor in config.input] == [False, True, True]
    assert json.loads(config.parameters["labels"].string_value) == ["sad", "neutral", "glad"]
    assert not config.model_transaction_policy.decoupled


CROSS_ENCODER = "torch.nn.modules.activation."


@pytest.mark.parametrize(
    ("kind", "changes", "activation"),
    [
        ("bert-classifier", {}, "softmax"),
        ("bert-classifier", {"problem_type": "multi_label_classification"}, "sigmoid"),
        ("cross-encoder", {}, "sigmoid"),
        ("cross-encoder", {"problem_type": "regression"}, "identity"),
        ("cross-encoder", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ("cross-encoder", {"sbert_ce_default_activation_function": f"{CROSS_ENCODER}Sigmoid"}, "sigmoid"),
    ],
)
def test_the_activation_is_that_of_the_files(saved, serve, tmp_path, kind, changes, activation):
    shutil.copytree(saved[kind][0], tmp_path / "m")
    rewrite(tmp_path / "m", **changes)
    assert serve(tmp_path / "m").description.parameters["activation"] == activation


def test_an_unknown_activation_is_refused(saved, serve, tmp_path):
    shutil.copytree(saved["cross-encoder"][0], tmp_path / "m")
    rewrite(tmp_path / "m", sentence_transformers={"activation_fn": f"{CROSS_ENCODER}GELU"})
    with pytest.raises(
        StartupError, match=r"model m: its activation 'torch\.nn\.modules\.activation\.GELU' is not one of"
    ):
        serve(tmp_path / "m")


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


async def test_an_unsupported_model_is_refused_in_one_line(tmp_path, serve):
    def refused(text):
        with pytest.raises(StartupError, match=text) as raised:
            serve(tmp_path)
        assert "\n" not in str(raised.value)

    save_random_encoder("bert", tmp_path)
    rewrite(tmp_path, architectures=["BertForMaskedLM"])
    refused("model m cannot be loaded: BertForMaskedLM is not served; it must generate text, classify or embed")
    rewrite(tmp_path, architectures=["BertForSequenceClassification"])
    refused("model m: .* lacks classifier.bias, classifier.weight, without which its answers are random")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, ModelKind.EMBEDDING),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, ModelKind.CLASSIFICATION),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, ModelKind.CLASSIFICATION),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"], "is_encoder_decoder": True}, ModelKind.EMBEDDING),
        ({"model_type": "bart", "architectures": ["BartModel"], "is_encoder_decoder": True}, ModelKind.GENERATION),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, ModelKind.GENERATION),
        ({"model_type": "gpt2", "architectures": ["GPT2Model"]}, ModelKind.EMBEDDING),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, ModelKind.EMBEDDING),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ModelKind.GENERATION),
        ({}, ModelKind.GENERATION),
    ],
)
def test_the_kind_is_decided_by_the_folder(tmp_path, config, kind):
    (tmp_path / "config.json").write_text(json.dumps(config))
    local, hub = ModelSource("m", str(tmp_path)), ModelSource("m", "somebody/something")
    assert kind_of(local, tmp_path) is kind
    (tmp_path / "model.py").touch()
    # Code of the hub is never run, whatever the source of its file.
    assert kind_of(hub, tmp_path) is kind
    assert kind_of(local, tmp_path) is ModelKind.PYTHON
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    is_pairs = "ForSequenceClassification" in str(config)
    assert kind_of(hub, tmp_path) is (ModelKind.CLASSIFICATION if is_pairs else ModelKind.EMBEDDING)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=6))
def test_padding_keeps_every_row_and_masks_the_rest(shapes):
    requests = [
        {INPUT_IDS: np.full(shape, i + 1), ATTENTION_MASK: np.ones(shape, np.int64)} for i, shape in enumerate(shapes)
    ]
    padded = pad(requests, pad_id=99)
    first = 0
    for number, (rows, length) in enumerate(shapes, 1):
        ids, mask = (padded[name][first : first + rows] for name in (INPUT_IDS, ATTENTION_MASK))
        assert (ids[:, :length] == number).all()
        assert (ids[:, length:] == 99).all()
        assert mask.sum() == rows * length
        first += rows
    assert len(padded[INPUT_IDS]) == first
