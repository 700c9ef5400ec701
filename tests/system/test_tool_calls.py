"""Tools and reasoning in the Responses API and in Anthropic's Messages API, with the own clients of both.

The models answer what the prompt says, see EchoPredictor; the rest of the stack is real.
"""

import asyncio
import re
from collections import deque
from contextlib import AsyncExitStack
from typing import NamedTuple

import orjson
import pytest_asyncio
from tokenizers import Tokenizer

from headrace.rpc.server.listeners import READY
from tests.support.runner_stack import Stack
from tests.support.scripted_predictor import ScriptedPredictor, serving, whole
from tests.support.tool_models import STORYTELLER, save_tool_model
from tests.system.own_clients import client_passes

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
OTHER_CALL = '<tool_call>{"name": "time", "arguments": {"city": "Paris", "x": [1]}}</tool_call>'


class EchoPredictor(ScriptedPredictor):
    """Answers with what follows the prompt's last `Say: `."""

    def __init__(self):
        super().__init__(models=("caller", "thinker"))
        self._tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
        self.script = deque([self._echo] * 1000)

    def text_of(self, call):
        return self._tokenizer.decode(list(call.request.prompt_ids), skip_special_tokens=False)

    @staticmethod
    async def _echo(predictor, call):
        text = predictor.text_of(call).rpartition("Say: ")[2].partition("<|assistant|>")[0]
        predictor.answer = predictor._tokenizer.encode(text, add_special_tokens=False).ids
        async for count in whole(predictor, call):
            yield count


class Echoing(NamedTuple):
    stack: Stack
    predictor: EchoPredictor

    def given(self, end):
        """The prompts that end with this text of the user."""
        return [text for call in self.predictor.calls if end in (text := self.predictor.text_of(call))]

    @property
    def grammars(self):
        """The grammars of calls that must be made."""
        sampling = [orjson.loads(call.request.sampling) for call in self.predictor.calls]
        forms = [orjson.loads(one.get("structured_outputs", "{}")) for one in sampling]
        return [form["grammar"] for form in forms if "grammar" in form]


@pytest_asyncio.fixture(scope="module")
async def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {
        "caller": await asyncio.to_thread(save_tool_model, root / "caller", "hermes"),
        "thinker": await asyncio.to_thread(save_tool_model, root / "thinker", "hermes", thinks=True),
    }
    return ",".join(f"{name}={folder}" for name, folder in folders.items())


@pytest_asyncio.fixture(scope="module")
async def running(stacks, models):
    """A stack before one predictor, which is the test's."""
    predictor = EchoPredictor()
    async with AsyncExitStack() as held:
        address = await held.enter_async_context(serving(predictor, healthy=("", READY)))
        settings = {"models": models, "predictors": 0, "predictor_endpoints": address}
        yield await held.enter_async_context(stacks.use(**settings)), predictor


@pytest_asyncio.fixture
async def echoing(running):
    stack, predictor = running
    predictor.calls.clear()
    return Echoing(stack, predictor)


def check_grammars(grammars, count):
    """There are so many, of which one lets every function be called and the others `time` alone."""
    functions = [frozenset(re.findall(r'\\"name\\": \\"(\w+)', grammar)) for grammar in grammars]
    assert set(functions) == {frozenset(("weather", "time")), frozenset(("time",))}
    assert len(functions) >= count


async def test_openais_own_client_calls_tools_and_reads_reasoning(echoing):
    await client_passes("responses_tools", echoing.stack.gateway)
    by_id, *others = echoing.given("Say: It rains in Rome.")
    assert others
    assert set(others) == {by_id}
    assert re.search(
        rf"<\|assistant\|>I look\.{re.escape(CALL)}{re.escape(OTHER_CALL)}.*"
        r"<\|user\|>\[call_\w+\] It rains\.<\|user\|>\[call_\w+\] It rains\.<\|user\|>Say: It rains",
        by_id,
        re.DOTALL,
    )
    reasoned = set(echoing.given("It is sunny."))
    assert len(reasoned) == 1
    assert f"<|assistant|>(Rome is\nfar.) {CALL}" in reasoned.pop()
    check_grammars(echoing.grammars, 3)
    assert all("<|assistant|>(Rome is far.) Well." in text for text in echoing.given("Say: Hm.</think>It is far."))
    (kept,) = set(echoing.given("<|user|>Say: The end."))
    assert kept.startswith("<s><|system|>Be brief.<|user|>A word. ")
    assert 1 < kept.count("Another.") < 20


async def test_anthropics_own_client_calls_tools_and_reads_reasoning(echoing):
    await client_passes("anthropic_tools", echoing.stack.gateway)
    after = set(echoing.given("Say: It rains in Rome."))
    assert len(after) == 1
    assert re.search(
        rf"<\|assistant\|>I look\.{re.escape(CALL)}{re.escape(OTHER_CALL)}.*"
        r"<\|user\|>\[call_\w+\] It rains\.<\|user\|>\[call_\w+\] Noon\.<\|user\|>Say: It rains",
        after.pop(),
        re.DOTALL,
    )
    reasoned = set(echoing.given("It is sunny."))
    assert len(reasoned) == 1
    assert f"<|assistant|>(Rome is\nfar.) {CALL}" in reasoned.pop()
    check_grammars(echoing.grammars, 2)
    assert {text.rpartition("<|user|>")[2] for text in echoing.given("It is wa")} == {"Say: rm.<|assistant|>It is wa"}
    assert all("<|user|>Rome\nIt rains.\nSay:" in text for text in echoing.given("Say: It does."))
    assert all(text.endswith("</think>\n\n") for text in echoing.given("<|user|>Say: Well."))
