"""Chats with tools and with reasoning: what the model is given, and how its answer is written, whole and streamed."""

import json
import shutil
from contextlib import asynccontextmanager

import orjson
import pytest
from tokenizers import Tokenizer

from tests.support.events import read_events
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, serving
from tests.support.tool_models import save_tool_model
from tests.support.transformer_fixtures import transformer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": SCHEMA}}
    for name in ("weather", "time")
]
USER = {"role": "user", "content": "Is it late in Rome?"}
ROME, PARIS = '{"city": "Rome"}', '{"city":"Paris","x":[1]}'
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "time", "arguments": {PARIS}}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ROME}}}; {{"name": "time", "parameters": {PARIS}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]time[ARGS]{PARIS}",
}
ACCEPT = ("accept", "text/event-stream")
FINGERPRINT = "0" * 31 + "1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    thinking = save_tool_model(root / "thinking", "hermes", thinks=True)
    return {"thinking": thinking} | {name: save_tool_model(root / name, name) for name in ANSWERS}


class Stack:
    def __init__(self, stub, predictor, folder):
        self._stub, self._predictor = stub, predictor
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def answers(self, text):
        """Makes the model's later answers this text."""
        self._predictor.answer = self._tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def sampling(self):
        return orjson.loads(self._predictor.calls[-1].request.sampling)

    @property
    def prompt_ids(self):
        return list(self._predictor.calls[-1].request.prompt_ids)

    @property
    def prompt(self):
        return self._tokenizer.decode(self.prompt_ids, skip_special_tokens=False)

    async def tokens(self, status=200, **body):
        answer = await self._stub.openai("Tokenize", orjson.dumps({"model": MODEL, **body}))
        assert answer.status == status, answer.data
        return orjson.loads(answer.data)

    async def chat(self, *headers, status=200, **fields):
        body = {"model": MODEL, "messages": [USER], "max_tokens": 500, "seed": 1, **fields}
        answer = await self._stub.openai("ChatCompletions", orjson.dumps(body), headers)
        assert answer.status == status, answer.data
        return read_events(answer.data) if fields.get("stream") else orjson.loads(answer.data)

    async def message(self, **fields):
        """A whole answer's message and finish reason; the streamed one must be the same."""
        whole = await self.chat(**fields)
        (choice,) = whole["choices"]
        assert (choice["message"].pop("refusal"), choice["message"].pop("annotations")) == (None, [])
        events = await self.chat(stream=True, stream_options={"include_usage": True}, **fields)
        *chunks, last = [orjson.loads(event.data) for event in events[:-1]]
        message, reason = joined(chunks)
        assert without_ids(message) == without_ids({"content": None} | choice["message"])
        assert reason == choice["finish_reason"]
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert last["usage"].get("completion_tokens_details") == whole["usage"].get("completion_tokens_details")
        return choice["message"], reason, whole["usage"]


@asynccontextmanager
async def stack(folder):
    predictor = ScriptedPredictor(fingerprint=FINGERPRINT)
    async with (
        serving(predictor) as address,
        transformer(address, f"{MODEL}={folder}", replicas=(address,)) as (stub, _),
    ):
        yield Stack(stub, predictor, folder)


def joined(chunks):
    """The message of a streamed answer, and its finish reason."""
    message, calls, reason = {}, [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].pop("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, text in choice["delta"].items():
            message[name] = message.get(name, "") + text
    return {**message, "content": message["content"] or None, **({"tool_calls": calls} if calls else {})}, reason


def without_ids(message):
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls", ())]}


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_are_read_in_the_models_own_format(folders, name):
    async with stack(folders[name]) as ask:
        ask.answers(f"I look. {ANSWERS[name]}")
        message, reason, _ = await ask.message(tools=TOOLS)
        given, _ = json.JSONDecoder().raw_decode(ask.prompt.partition("Tools: ")[2])
        assert given == TOOLS
        assert (message["content"], reason) == ("I look.", "tool_calls")
        first, second = message["tool_calls"]
        assert [first["function"], second["function"]] == [
            {"name": "weather", "arguments": ROME},
            {"name": "time", "arguments": PARIS},
        ]
        ids = {first["id"], second["id"]}
        assert len(ids) == 2
        assert all(len(one) == 9 and one.isalnum() if name == "mistral" else one.startswith("call_") for one in ids)
        one, _, _ = await ask.message(tools=TOOLS, parallel_tool_calls=False)
        assert len(one["tool_calls"]) == 1
        counted = await ask.tokens(messages=[USER], tools=TOOLS)
        assert counted["tokens"] == ask.prompt_ids
        # The calls and their answers go back to the model.
        tool = {"role": "tool", "tool_call_id": first["id"], "content": "It rains."}
        ask.answers("It rains in Rome.")
        message, reason, _ = await ask.message(tools=TOOLS, messages=[USER, one, tool])
        assert (message, reason) == ({"role": "assistant", "content": "It rains in Rome."}, "stop")
        assert '"name": "weather"' in ask.prompt
        assert f"[{first['id']}] It rains." in ask.prompt
        # Without tools nothing is read.
        ask.answers(ANSWERS["hermes"])
        message, reason, _ = await ask.message(tools=TOOLS, tool_choice="none")
        assert (message["content"], reason) == (ANSWERS["hermes"], "stop")


async def test_an_end_token_that_is_not_special_has_no_text_either(folders, tmp_path):
    folder = shutil.copytree(folders["hermes"], tmp_path / "model")
    *_, end = Tokenizer.from_file(f"{folder}/tokenizer.json").encode("It rains in Rome!").ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    async with stack(folder) as ask:
        ask.answers("It rains! Stop!")
        assert (await ask.message())[:2] == ({"role": "assistant", "content": "It rains! Stop"}, "stop")


async def test_a_reconnecting_client_gets_the_rest_of_the_same_calls(folders):
    async with stack(folders["hermes"]) as ask:
        ask.answers(ANSWERS["hermes"])
        fields = {"tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        events = await ask.chat(ACCEPT, seed=None, **fields)
        whole, reason = answer_in(events)
        assert len({call["id"] for call in whole["tool_calls"]}) == 2
        for received in range(1, len(events) - 2):
            rest = await ask.chat(ACCEPT, ("last-event-id", events[received - 1].id), seed=None, **fields)
            # Tokens that wait together are one event, so the rest may be cut elsewhere.
            assert answer_in([*events[:received], *rest]) == (whole, reason)


def answer_in(events):
    """As `joined`, of events of which the last two are the usage and the end."""
    return joined([orjson.loads(event.data) for event in events[:-2]])


async def test_reasoning_is_apart_from_the_answer(folders):
    async with stack(folders["thinking"]) as ask:
        ask.answers(f"Rome is\nfar.\n</think>\n\n{ANSWERS['hermes']}")
        message, reason, usage = await ask.message(tools=TOOLS)
        assert (message["reasoning"], message["reasoning_content"]) == ("Rome is\nfar.",) * 2
        assert (message["content"], reason, len(message["tool_calls"])) == (None, "tool_calls", 2)
        count = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 5 < count < usage["completion_tokens"]
        message, _, usage = await ask.message(chat_template_kwargs={"enable_thinking": False})
        assert ask.prompt.endswith("<think>\n\n</think>\n\n")
        assert message["content"].startswith("Rome is\nfar.\n</think>")
        assert "completion_tokens_details" not in usage
        message, reason, _ = await ask.message(max_tokens=2)
        assert (message["content"], reason) == (None, "length")
        earlier = {"role": "assistant", "content": "No.", "reasoning_content": "It is noon."}
        await ask.message(messages=[USER, earlier, USER])
        assert "(It is noon.) No." in ask.prompt


async def test_the_arguments_of_strict_functions_alone_have_a_grammar(folders):
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    async with stack(folders["hermes"]) as ask:
        ask.answers(ANSWERS["hermes"])
        grammars = []
        for tools, fields in ((TOOLS, {}), ([strict, TOOLS[1]], {}), ([strict], {"tool_choice": "none"})):
            await ask.message(tools=tools, **fields)
            form = ask.sampling.get("structured_outputs", '{"grammar": ""}')
            grammars.append(json.loads(form)["grammar"])
    assert (grammars[0], grammars[2]) == ("", "")
    assert grammars[1].startswith("start: text | calls\n")
    of_weather, of_time = (next(line for line in grammars[1].splitlines() if f"function_{i}:" in line) for i in (0, 1))
    assert ('"city"' in of_weather, '"city"' in of_time) == (True, False)


async def test_a_call_is_written_in_the_older_way_for_functions(folders):
    functions = [tool["function"] for tool in TOOLS]
    call = {"name": "weather", "arguments": ROME}
    async with stack(folders["mistral"]) as ask:
        ask.answers(ANSWERS["mistral"])
        (choice,) = (await ask.chat(functions=functions))["choices"]
        message, prompt = choice["message"], ask.prompt
        assert (choice["finish_reason"], message["content"], message["function_call"]) == ("function_call", None, call)
        assert "tool_calls" not in message
        events = await ask.chat(functions=functions, stream=True)
        choices = [orjson.loads(event.data)["choices"][0] for event in events[:-1]]
        deltas = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
        assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
        assert ("".join(delta["arguments"] for delta in deltas), choices[-1]["finish_reason"]) == (
            ROME,
            "function_call",
        )
        await ask.chat(tools=TOOLS, parallel_tool_calls=False)
        assert ask.prompt == prompt
        history = [
            {"role": "assistant", "function_call": call},
            {"role": "function", "name": "weather", "content": "Sun."},
        ]
        await ask.chat(messages=[USER, *history], functions=functions)
        assert f'[TOOL_CALLS]{{"name": "weather", "arguments": {ROME}}}' in ask.prompt
        assert "Sun." in ask.prompt


async def test_the_template_gets_efforts_and_the_last_message_is_continued(folders):
    async with stack(folders["thinking"]) as ask:
        for effort, end in (("none", "<think>\n\n</think>\n\n"), ("high", "<|assistant|><think>\n")):
            await ask.chat(reasoning_effort=effort)
            assert ask.prompt.endswith(end)
        begun = {"messages": [USER, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
        await ask.chat(**begun)
        assert ask.prompt.endswith("<|assistant|>It is ")
        assert (await ask.tokens(**begun))["tokens"] == ask.prompt_ids
        await ask.chat(add_generation_prompt=False)
        assert ask.prompt.endswith(USER["content"])
