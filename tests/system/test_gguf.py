"""A stack whose model is a GGUF file: it answers as the folder from which the file was made."""

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.gguf_files import write_gguf
from tests.random_models import ROOT
from tests.system.calls import generate, rest

FOLDER = ROOT / "models" / "storyteller"
TEXT = "Once upon a time, there was a little crème brûlée 123 456"


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    path = tmp_path_factory.mktemp("models") / "stories-F32.gguf"
    write_gguf(path, model)
    environment = {"predictor": {"PREDICTOR_DTYPE": "fp32"}}
    async with stacks.use(models=f"folder={FOLDER},file={path}", environment=environment) as started:
        yield started


async def answer(stack, model, **fields):
    responses = await generate(stack.gateway, model=model, max_tokens=48, **fields)
    return [token for one in responses for token in one.token_ids], "".join(one.text for one in responses)


@pytest.mark.parametrize(
    "fields", [{"prompt": TEXT, "temperature": 0.0}, {"prompt": TEXT, "seed": 7, "temperature": 0.9}]
)
async def test_answers_are_those_of_the_folder(stack, fields):
    assert await answer(stack, "file", **fields) == await answer(stack, "folder", **fields)


async def test_chats_have_the_files_template(stack):
    body = {"messages": [{"role": "user", "content": "Hello <|user|> there"}], "max_tokens": 24, "temperature": 0}
    of_file, of_folder = [
        (await rest(stack.gateway, "POST", "/v1/chat/completions", {**body, "model": name})).json
        for name in ("file", "folder")
    ]
    assert of_file["choices"] == of_folder["choices"]
    assert of_file["usage"] == of_folder["usage"]
