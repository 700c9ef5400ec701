"""Work that all choices of a request share is done once, and a refused request causes none."""

import asyncio

import orjson
import pytest

from headrace_transformer.generation import recording
from headrace_transformer.text.tokenizer import TextTokenizer
from tests.process.foreign_server import ForeignServer, foreign_server
from tests.support.transformer_fixtures import transformer


class Counted:
    """Replaces a function and counts its calls."""

    def __init__(self, monkeypatch, owner, name):
        self.calls = 0
        made = getattr(owner, name)

        def count(*arguments, **options):
            self.calls += 1
            return made(*arguments, **options)

        monkeypatch.setattr(owner, name, count)


@pytest.fixture
async def ask():
    """Sends completions to a transformer before a server whose model repeats its prompt."""
    async with foreign_server(ForeignServer()) as address, transformer(address, "ids=models/storyteller") as (stub, _):

        async def completions(**body):
            answer = await stub.openai("Completions", orjson.dumps({"model": "ids", "max_tokens": 2, **body}))
            return answer.status, orjson.loads(answer.data)

        yield completions


@pytest.fixture
def tokenised(monkeypatch):
    return Counted(monkeypatch, TextTokenizer, "encode")


@pytest.fixture
def recorded(monkeypatch):
    return Counted(monkeypatch, recording, "_recorded_prompt")


@pytest.mark.parametrize("seed", [{}, {"seed": 7}])
async def test_each_prompt_is_tokenised_and_recorded_once_for_all_its_choices(ask, tokenised, recorded, seed):
    prompts = ["Once upon a time", "There was a fox", "A dog", "The sun"]
    _, answer = await ask(prompt=prompts, n=16, **seed)
    assert len(answer["choices"]) == 64
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    assert (tokenised.calls, recorded.calls) == (4, 4)


@pytest.mark.parametrize(
    ("field", "value"), [("stop", ["x"] * 5000), ("stop", ["x" * 2000]), ("prompt", "")], ids=["many", "long", "empty"]
)
async def test_a_request_that_is_too_large_is_neither_tokenised_nor_recorded(ask, tokenised, recorded, field, value):
    status, _ = await ask(**{"prompt": ["Once"] * 4, "n": 16, field: value})
    assert status == 400
    assert (tokenised.calls, recorded.calls) == (0, 0)


async def test_a_cancelled_choice_leaves_the_prompt_to_the_others(ask):
    answers = await asyncio.gather(*(ask(prompt="Once upon a time", n=3) for _ in range(4)))
    assert all(len(answer["choices"]) == 3 for _, answer in answers)
