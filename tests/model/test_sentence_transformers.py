"""Folders that sentence-transformers wrote: vectors and scores are those that it computes of the same texts."""

import asyncio
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headrace.errors import InvalidRequestError, StartupError
from headrace.models.sources import ModelSource
from headrace.oip.model_description import INPUT_IDS, POOLING_MASK, TOKEN_TYPE_IDS, config_of, metadata_of
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_predictor.repository.loading import build_here, fetch_model
from headrace_predictor.settings import PredictorSettings
from headrace_protos.inference_pb2 import ModelInferRequest
from headrace_transformer.inference.rows import RowReader
from headrace_transformer.models.models import model_of
from headrace_transformer.predictors.discovery.descriptions import described
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.model_text import read_text
from headrace_transformer.text.tokenizer import TextTokenizer
from tests.random_encoders import FAMILIES, TEXTS, WORDS, save_random_type, save_words_tokenizer
from tests.support.full import usually
from tests.support.lazy import library, parts

PAIRS = [("a fox", text) for text in TEXTS]
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Served:
    """A folder behind both services' code, without the network."""

    def __init__(self, folder, bodies, **settings):
        self.bodies = bodies
        settings = {"batch_rows": 8, "batch_delay_ms": 20, "device": "cpu", **settings}
        source = ModelSource("m", str(folder))
        self.model = build_here(source, fetch_model(source, print), PredictorSettings(**settings), print)
        description = self.model.description
        known = described(metadata_of("m", ["1"], description), config_of("m", description))
        with ThreadPoolExecutor(1) as pool:
            self.pool = pool
            self.rows = model_of("m", known, read_text(source, pool)).rows

    def reader(self, cut=None):
        return RowReader(self.rows, self.bodies, cut)

    async def vector(self, row):
        request = ModelInferRequest(model_name="m")
        add_input(request, Tensor(INPUT_IDS, "INT64", np.array(row.ids, np.int64)))
        if row.type_ids is not None:
            add_input(request, Tensor(TOKEN_TYPE_IDS, "INT64", np.array(row.type_ids, np.int64)))
        if row.not_pooled:
            pooled = (np.arange(len(row.ids)) >= row.not_pooled).astype(np.int64)
            add_input(request, Tensor(POOLING_MASK, "INT64", pooled))
        (output,) = decode_outputs(await self.model.infer(request)).values()
        return output.array[0]

    async def embed(self, texts, prompt_name=None, input_type=None, cut=None):
        reader = self.reader(cut)
        prompt = reader.prompt(prompt_name, input_type)
        rows = [await reader.row(text, "input", "input", prompt) for text in texts]
        return np.stack(await asyncio.gather(*map(self.vector, rows)))

    async def scores(self, pairs, prompt_name=None):
        reader = self.reader()
        rows = [await reader.pair(*pair, "pair", "documents", reader.prompt(prompt_name)) for pair in pairs]
        vectors = await asyncio.gather(*map(self.vector, rows))
        return np.stack([self.rows.activation(vector) for vector in vectors])


@pytest.fixture(scope="module")
async def bodies():
    made = BodyProcesses()
    yield made
    await made.close()


@pytest.fixture
def serve(bodies):
    served = []

    def start(folder, **settings):
        served.append(Served(folder, bodies, **settings))
        return served[-1]

    yield start
    for one in served:
        one.model.close()


def saved(model, folder):
    """Saves a model of sentence-transformers, and returns it as it is read from there."""
    model.save(str(folder))
    return type(model)(str(folder), device="cpu")


def embedder(tmp_path, kind="bert", pooling="mean", more=(), transformer=None, **options):
    """A model of this type with these modules, and its folder."""
    save_random_type(kind, tmp_path / "inner")
    save_words_tokenizer(tmp_path / "inner", *WORDS)
    first = parts.Transformer(str(tmp_path / "inner"), **(transformer or {}))
    modules = [first, parts.Pooling(32, pooling), *more]
    return saved(library.SentenceTransformer(modules=modules, device="cpu", **options), tmp_path / "m"), tmp_path / "m"


async def check_embeddings(model, served, **options):
    together = await served.embed(TEXTS, **options)
    encode_options = {"prompt_name": options.get("prompt_name")} if options else {}
    # Some models read the padding: the right vector is that of a text alone.
    np.testing.assert_allclose(together, model.encode(TEXTS, batch_size=1, **encode_options), **TOLERANCE)
    np.testing.assert_allclose(await served.embed(TEXTS[:1], **options), together[:1], **TOLERANCE)
    assert np.ptp(together, axis=0).max() > 0.01  # Else the vectors would be alike whatever the texts are.


# The others run with FULL=1.
SLICE = {"bert", "xlm-roberta", "modernbert", "deberta-v2", "qwen3", "t5"}


def each(outcome):
    """The families that transformers has for it, of `Encoder`'s outcomes."""
    for family in FAMILIES:
        if getattr(family, outcome):
            yield pytest.param(family, id=family.name, marks=[] if family.model_type in SLICE else [pytest.mark.full])


@pytest.mark.parametrize("family", [*each("vectors")])
async def test_vectors_of_every_family(tmp_path, serve, family):
    dense = [parts.Dense(32, 32, activation_function=torch.nn.Tanh()) for _ in range(family.dense)]
    model, folder = embedder(tmp_path, family.model_type, more=[*dense, parts.Normalize()])
    if isinstance(family.vectors, str):
        with pytest.raises(StartupError, match=family.vectors):
            serve(folder)
    else:
        await check_embeddings(model, serve(folder))


# ModernBERT pools as BERT does.
@pytest.mark.parametrize(
    "kind", usually(("bert", "gemma3_text", "qwen3"), ("bert", "modernbert", "qwen3", "gemma3_text"))
)
async def test_a_folder_of_transformers_alone_is_read_with_the_same_defaults(tmp_path, serve, kind):
    save_random_type(kind, tmp_path)
    tokenizer = save_words_tokenizer(tmp_path, *WORDS, "user")
    await check_embeddings(library.SentenceTransformer(str(tmp_path), device="cpu"), serve(tmp_path))
    tokenizer.chat_template = FLAT
    tokenizer.save_pretrained(tmp_path)
    await check_embeddings(library.SentenceTransformer(str(tmp_path), device="cpu"), serve(tmp_path))


FLAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
WAYS = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")


def random_dense(**options):
    torch.manual_seed(1)
    return parts.Dense(32, 16, **options)


STACKS = {
    **{way: lambda way=way: {"pooling": way} for way in WAYS},
    "several": lambda: {"pooling": ["mean", "cls", "lasttoken"]},
    "dense": lambda: {"more": [random_dense(), parts.Normalize()]},
    "gelu": lambda: {"more": [random_dense(bias=False, activation_function=torch.nn.GELU(), use_residual=True)]},
    "two dense": lambda: {"more": [random_dense(activation_function=None), parts.Dense(16, 24), parts.Normalize()]},
    "layer norm": lambda: {"more": [parts.LayerNorm(32), parts.Dropout(0.5)]},
    "truncated": lambda: {"more": [parts.Normalize()], "truncate_dim": 8},
    "short": lambda: {"transformer": {"max_seq_length": 9}},
    "lower case": lambda: {"transformer": {"do_lower_case": True}},
}


@pytest.mark.parametrize("stack", STACKS)
async def test_vectors_of_every_module(tmp_path, serve, stack):
    assert set(WAYS) == set(parts.Pooling.POOLING_MODES)
    model, folder = embedder(tmp_path, **STACKS[stack]())
    served = serve(folder)
    texts = ["The FOX sat", *TEXTS]
    wanted = model.encode(texts)
    np.testing.assert_allclose(await served.embed(texts, cut=-1), wanted, **TOLERANCE)
    assert list(served.model.description.outputs[0].shape) == [-1, wanted.shape[1]]


async def test_texts_beyond_the_model_are_refused_or_cut_as_sentence_transformers_does(tmp_path, serve):
    model, folder = embedder(tmp_path, transformer={"max_seq_length": 9})
    served = serve(folder)
    with pytest.raises(InvalidRequestError, match="input: the prompt has 17 tokens, the context is 9"):
        await served.embed(TEXTS)
    np.testing.assert_allclose(await served.embed(TEXTS, cut=-1), model.encode(TEXTS), **TOLERANCE)
    model.max_seq_length = 5
    np.testing.assert_allclose(await served.embed(TEXTS, cut=5), model.encode(TEXTS), **TOLERANCE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"truncation_side": "left"}))
    left = library.SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(await serve(folder).embed(TEXTS, cut=-1), left.encode(TEXTS), **TOLERANCE)
    with pytest.raises(InvalidRequestError, match="1 tokens have no room for the model's 2 special tokens"):
        await served.embed(TEXTS, cut=1)


async def test_a_transformer_in_a_folder_of_its_own_with_files_of_an_earlier_version(tmp_path, serve):
    _, folder = embedder(tmp_path, transformer={"do_lower_case": True})
    (folder / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "0_Transformer" / name)
    (folder / "sentence_bert_config.json").unlink()
    older = {"max_seq_length": 9, "do_lower_case": True}
    (folder / "0_Transformer" / "sentence_roberta_config.json").write_text(json.dumps(older))
    modules = json.loads((folder / "modules.json").read_text())
    names = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    changed = [module | {"type": name} for module, name in zip(modules, names, strict=True)]
    changed[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(changed))
    flags = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    model = library.SentenceTransformer(str(folder), device="cpu")
    texts = ["The FOX sat", *TEXTS]
    np.testing.assert_allclose(await serve(folder).embed(texts, cut=-1), model.encode(texts), **TOLERANCE)


def test_pairs_are_cut_as_the_library_cuts_them(tmp_path):
    backend = save_words_tokenizer(tmp_path, *WORDS).backend_tokenizer
    with ThreadPoolExecutor(1) as pool:
        ours = TextTokenizer("m", tmp_path, pool)
    reference = Tokenizer.from_str(backend.to_str())
    for room, *pair in itertools.product(range(3, 20), TEXTS, TEXTS):
        reference.enable_truncation(room, strategy="longest_first")
        wanted = reference.encode(*pair)
        assert asyncio.run(ours.row(pair, room, "right")) == (wanted.ids, wanted.type_ids), (room, pair)


PROMPTS = {"query": "query : ", "passage": "document : ", "task": "task : a "}


async def test_prompts(tmp_path, serve):
    model, folder = embedder(tmp_path, prompts=PROMPTS, default_prompt_name="task")
    served = serve(folder)
    await check_embeddings(model, served)
    for name in (*PROMPTS, "document"):
        await check_embeddings(model, served, prompt_name=name)
    for kind, wanted in {"query": model.encode_query, "document": model.encode_document}.items():
        np.testing.assert_allclose(await served.embed(TEXTS, input_type=kind), wanted(TEXTS), **TOLERANCE)
    passages = model.encode(TEXTS, prompt_name="passage")
    np.testing.assert_allclose(await served.embed(TEXTS, input_type="passage"), passages, **TOLERANCE)
    with pytest.raises(InvalidRequestError, match="has no prompt 'x'; it has query, document, passage, task"):
        await served.embed(TEXTS, prompt_name="x")
    with pytest.raises(InvalidRequestError, match="input_type 'x' is not one of query, document, passage"):
        await served.embed(TEXTS, input_type="x")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("mean", "lasttoken") else pytest.mark.full) for way in WAYS]
)
async def test_tokens_of_a_prompt_that_are_not_pooled(tmp_path, serve, way):
    model, folder = embedder(tmp_path, pooling=way, prompts=PROMPTS, default_prompt_name="task")
    model.set_pooling_include_prompt(False)
    model = saved(model, folder)
    served = serve(folder)
    await check_embeddings(model, served)
    await check_embeddings(model, served, prompt_name="document")


STRUCTURED = "{% for m in messages %}{{ m['role'] }} : {{ m.content[0].text }} {% endfor %}"


@pytest.mark.parametrize("template", [FLAT, STRUCTURED])
async def test_texts_go_into_a_chat_template_where_sentence_transformers_puts_them(tmp_path, serve, template):
    save_random_type("qwen3", tmp_path / "inner")
    tokenizer = save_words_tokenizer(tmp_path / "inner", *WORDS, "user", "system")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "inner")
    modules = [parts.Transformer(str(tmp_path / "inner")), parts.Pooling(32, "lasttoken")]
    options = {"prompts": PROMPTS, "device": "cpu"}
    model = saved(library.SentenceTransformer(modules=modules, **options), tmp_path / "m")
    served = serve(tmp_path / "m")
    await check_embeddings(model, served)
    await check_embeddings(model, served, prompt_name="task")
    with pytest.raises(InvalidRequestError, match="texts in a chat template are not cut"):
        await served.embed(TEXTS, cut=-1)


@pytest.mark.parametrize("is_quantized", [False, True])
async def test_static_embeddings(tmp_path, serve, is_quantized):
    backend = save_words_tokenizer(tmp_path / "inner", *WORDS).backend_tokenizer
    torch.manual_seed(0)
    weights = torch.randn(backend.get_vocab_size(), 12)
    modules = [parts.StaticEmbedding(backend, embedding_weights=weights), parts.Normalize()]
    folder = tmp_path / "m"
    model = saved(library.SentenceTransformer(modules=modules, device="cpu"), folder)
    if is_quantized:  # As model2vec saves one.
        from safetensors.torch import save_file

        (file,) = folder.rglob("model.safetensors")
        mapping = torch.arange(len(weights)) // 2
        save_file({"embeddings": weights[:9], "mapping": mapping, "weights": torch.rand(len(weights))}, file)
        model = library.SentenceTransformer(str(folder), device="cpu")
    await check_embeddings(model, serve(folder))


def cross_encoder(tmp_path, kind, **options):
    save_random_type(kind, tmp_path / "inner", AutoModelForSequenceClassification, id2label={0: "LABEL_0"})
    save_words_tokenizer(tmp_path / "inner", *WORDS)
    return saved(library.CrossEncoder(str(tmp_path / "inner"), device="cpu", **options), tmp_path / "m"), tmp_path / "m"


@pytest.mark.parametrize("family", [*each("scores")])
async def test_scores_of_every_family(tmp_path, serve, family):
    kind = family.model_type
    activation = torch.nn.Identity() if kind == "modernbert" else None
    model, folder = cross_encoder(tmp_path, kind, activation_fn=activation)
    if isinstance(family.scores, str):
        with pytest.raises(StartupError, match=family.scores):
            serve(folder)
        return
    assert np.ptp(model.predict(PAIRS)) > 0.001
    # transformers 5 splits words of its own in every qwen2 folder, so that the inner one has other ids there.
    for place in [folder] if kind == "qwen2" else [folder, tmp_path / "inner"]:
        served = serve(place)
        assert served.model.description.parameters["kind"] == "classification"
        expected = library.CrossEncoder(str(place), device="cpu").predict(PAIRS, batch_size=1)[:, None]
        np.testing.assert_allclose(await served.scores(PAIRS), expected, **TOLERANCE)
        np.testing.assert_allclose(await served.scores(PAIRS[:1]), expected[:1], **TOLERANCE)
    # The class of the configuration decides where no file names the type of the model.
    (folder / "config_sentence_transformers.json").unlink()
    assert serve(folder).model.description.parameters["kind"] == "classification"


@pytest.mark.parametrize("template", [FLAT, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"])
async def test_a_classifiers_chat_template_is_used_where_it_carries_a_pair(tmp_path, serve, template):
    save_random_type("qwen3", tmp_path, AutoModelForSequenceClassification, id2label={0: "LABEL_0"})
    tokenizer = save_words_tokenizer(tmp_path, *WORDS)
    plain = library.CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    model = library.CrossEncoder(str(tmp_path), device="cpu")
    if template is FLAT:
        wanted = model.predict(PAIRS)
        assert np.abs(wanted - plain).max() > 0.01
    else:
        wanted = plain
        with pytest.raises(ValueError, match="cannot carry a 'query'/'document' pair"):
            model.predict(PAIRS)
    np.testing.assert_allclose(await serve(tmp_path).scores(PAIRS), wanted[:, None], **TOLERANCE)
    if template is not FLAT:  # Where the files ask for a template, one that leaves out texts is refused.
        model.save(str(tmp_path / "m"))
        with pytest.raises(InvalidRequestError, match="does not carry a query and a document"):
            await serve(tmp_path / "m").scores(PAIRS)


RERANKER = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}{{ 'task' if add_generation_prompt }}"
)


@pytest.mark.parametrize("family", [*each("logits")])
async def test_scores_of_a_reranker_that_generates_in_its_chat_template(tmp_path, serve, family):
    save_random_type(family.model_type, tmp_path / "inner", AutoModelForCausalLM)
    tokenizer = save_words_tokenizer(tmp_path / "inner", *WORDS, "system")
    tokenizer.chat_template = RERANKER
    tokenizer.save_pretrained(tmp_path / "inner")
    options = {
        "transformer_task": "text-generation",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    modules = [parts.Transformer(str(tmp_path / "inner"), **options), library.cross_encoder.modules.LogitScore(7, 11)]
    model = library.CrossEncoder(
        modules=modules, device="cpu", prompts={"task": "task a"}, activation_fn=torch.nn.Sigmoid()
    )
    model = saved(model, tmp_path / "m")
    served = serve(tmp_path / "m")
    for name in (None, "task"):
        wanted = model.predict(PAIRS, prompt_name=name)[:, None]
        np.testing.assert_allclose(await served.scores(PAIRS, name), wanted, **TOLERANCE)
        np.testing.assert_allclose(await served.scores(PAIRS[2:3], name), wanted[2:3], **TOLERANCE)


def set_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def module_type(folder, name):
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules[:-1], modules[-1] | {"type": name}]))


def without_safetensors(folder):
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


TRANSFORMER, MODEL = "sentence_bert_config.json", "config_sentence_transformers.json"
REFUSALS = {
    "an unknown module": (lambda f: module_type(f, "sentence_transformers.x.LSTM"), "its module LSTM is not served"),
    "code": (lambda f: module_type(f, "custom_st.Normalize"), "the module custom_st.Normalize: code of its own"),
    "a sparse model": (lambda f: set_json(f / MODEL, model_type="SparseEncoder"), "type SparseEncoder are not served"),
    "a pooling": (lambda f: set_json(f / "1_Pooling/config.json", pooling_mode="attention"), "pooling attention is"),
    "a flag": (
        lambda f: (f / "1_Pooling/config.json").write_text('{"pooling_mode_attention": true}'),
        "its pooling pooling_mode_attention is not one of cls",
    ),
    "a dense layer in another format": (without_safetensors, "its module Dense has no model.safetensors in 2_Dense"),
    "an activation": (
        lambda f: set_json(f / "2_Dense/config.json", activation_function="mine.Swish"),
        "the activation mine.Swish of its Dense is not torch's own",
    ),
    "images": (
        lambda f: set_json(f / TRANSFORMER, modality_config={"image": {"method": "get_image_features"}}),
        "has modality image, which is not served",
    ),
    "another layer": (
        lambda f: set_json(
            f / TRANSFORMER,
            modality_config={"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}},
        ),
        "method_output_name .'hidden_states', -2., which is not served",
    ),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "it is an adapter of PEFT for an encoder"),
    "code of a model": (lambda f: set_json(f / "config.json", auto_map={"AutoModel": "x.Y"}), "has code of its own"),
    "options": (lambda f: set_json(f / TRANSFORMER, config_kwargs={"is_causal": False}), "has config_kwargs, which is"),
    "a task": (lambda f: set_json(f / TRANSFORMER, transformer_task="fill-mask", modality_config={}), "task fill-mask"),
    "no pooling": (lambda f: module_type(f, "sentence_transformers.x.Dropout"), "make no sentence_embedding"),
    "another folder": (
        lambda f: (f / "modules.json").write_text('[{"type": "sentence_transformers.a.Transformer", "path": "../x"}]'),
        "names files outside of its folder",
    ),
    "other JSON": (lambda f: (f / "modules.json").write_text('{"a": 1}'), "modules.json or a file that belongs to it"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folders of embedders without and with a dense layer."""
    return [embedder(tmp_path_factory.mktemp("whole"), more=more)[1] for more in ([], [random_dense()])]


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_computed_is_refused_by_name(whole, tmp_path, case):
    change, message = REFUSALS[case]
    folder = shutil.copytree(whole[case != "no pooling"], tmp_path / "m")
    change(folder)
    source = ModelSource("m", str(folder))
    with pytest.raises(StartupError, match=message) as error:
        build_here(source, fetch_model(source, print), PredictorSettings(device="cpu"), print).close()
    assert "model m" in str(error.value)
