"""What a model's own files say holds over HTTP: tokenizer.json, generation_config.json, a folder without the former."""

import json

import pytest
import pytest_asyncio
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM

from tests.random_models import save_random_model
from tests.system.calls import rest

TEXT = "In 1234567 a fox said </s> twice."


def save(folder, **generation):
    model = save_random_model("bart" if "forced_bos_token_id" in generation else "llama", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A llama whose tokenizer splits digits by three, a BART that forces tokens, a llama with vocab.json only."""
    folders = {name: tmp_path_factory.mktemp("models") / name for name in ("digits", "forced", "pairs")}
    save(folders["digits"], temperature=0.1, max_new_tokens=3)
    path = folders["digits"] / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    split = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.save(str(path))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folders["digits"] / "tokenizer_config.json").write_text(json.dumps(config))
    forced = {"forced_bos_token_id": 77, "forced_eos_token_id": 2, "max_length": 9, "decoder_start_token_id": 0}
    save(folders["forced"], num_beams=4, length_penalty=2.0, **forced)
    save(folders["pairs"])
    tokenizer.model.save(str(folders["pairs"]))
    (folders["pairs"] / "tokenizer.json").unlink()
    (folders["pairs"] / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return folders


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, folders):
    sources = ",".join(f"{name}={folder}" for name, folder in folders.items())
    async with stacks.use(models=sources) as started:
        yield started


async def post(stack, path, status=200, **body):
    answer = await rest(stack.gateway, "POST", path, body)
    assert answer.status == status, answer.body
    return answer.json


async def parameters(stack, model):
    answer = await rest(stack.gateway, "GET", f"/v2/models/{model}/config")
    return {name: value["string_value"] for name, value in answer.json["parameters"].items()}


async def ids_of(stack, model, text):
    return (await post(stack, "/tokenize", model=model, prompt=text))["tokens"]


async def test_ids_are_those_of_the_file(stack, folders):
    file = Tokenizer.from_file(str(folders["digits"] / "tokenizer.json"))
    ids = await ids_of(stack, "digits", TEXT)
    assert ids == file.encode(TEXT).ids
    text = await post(stack, "/detokenize", model="digits", tokens=ids)
    assert text["prompt"] == file.decode(ids, skip_special_tokens=False)


async def test_ids_without_the_file_are_those_of_its_vocabulary(stack, folders):
    model = models.BPE.from_file(*(str(folders["pairs"] / name) for name in ("vocab.json", "merges.txt")))
    pairs = Tokenizer(model)
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "Once a fox said 12 times: no!"
    assert await ids_of(stack, "pairs", text) == pairs.encode(text).ids


async def test_the_generation_config_holds_and_says_what_does_not(stack, folders):
    shown = await parameters(stack, "forced")
    assert shown["generation_config_ignored"] == "num_beams=4, length_penalty=2.0"
    assert "generation_config_ignored" not in await parameters(stack, "digits")
    tokenizer = Tokenizer.from_file(str(folders["forced"] / "tokenizer.json"))
    prompt = tokenizer.encode("a fox").ids
    model = AutoModelForSeq2SeqLM.from_pretrained(folders["forced"])
    expected = model.generate(torch.tensor([prompt]), do_sample=False, num_beams=1)[0, 1:].tolist()
    assert (expected[0], expected[-1], len(expected)) == (77, 2, 8)
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a fox"]}]
    answer = await post(stack, "/v2/models/forced/infer", inputs=inputs)
    given = {output["name"]: output["data"][0] for output in answer["outputs"]}
    assert given["text_output"] == tokenizer.decode(expected)
