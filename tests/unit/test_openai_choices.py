"""Choices of one request run side by side, end together, are the same for a seed; how their events are written."""

import asyncio
import json
from contextlib import aclosing

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.http import event
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat
from headrace_transformer.frontends.openai.bodies import _Events, generate_all
from headrace_transformer.frontends.openai.generation_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    choice_seed,
    choices_of,
)
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import AnswerIdentity, ResumePoint, Signer
from headrace_transformer.text.answer_parts import CallArguments, CallStart
from tests.support.text_chunks import text_chunk
from tests.waiting import until


def request(**fields):
    return TextRequest(call=CallContext("test", "r"), model="m", prompt="p", **fields)


def chunk(text):
    return text_chunk(text, [1])


class FakePipeline:
    """Generations that continue when the test opens them; `running` counts those that have not ended."""

    def __init__(self, count, length=3, fails_at=None):
        self.gates = [asyncio.Semaphore(0) for _ in range(count)]
        self.running = self.begun = 0
        self._length = length
        self._fails_at = fails_at

    async def generate(self, request):
        index = self.begun
        self.begun += 1
        self.running += 1
        try:
            for step in range(self._length):
                await self.gates[index].acquire()
                if (index, step) == self._fails_at:
                    raise InvalidRequestError("refused")
                yield chunk(f"{index}.{step}")
        finally:
            self.running -= 1

    def open(self):
        for gate in self.gates:
            for _ in range(self._length):
                gate.release()


async def test_no_choice_waits_for_another():
    pipeline = FakePipeline(2)
    async with aclosing(generate_all(pipeline, [request()] * 2)) as chunks:
        for index in (1, 0, 0, 1):
            pipeline.gates[index].release()
            assert (await anext(chunks))[0] == index


@pytest.mark.parametrize("count", [1, 5])
async def test_closing_ends_all_choices(count):
    pipeline = FakePipeline(count)
    async with aclosing(generate_all(pipeline, [request()] * count)) as chunks:
        pipeline.gates[0].release()
        await anext(chunks)
        assert pipeline.running == count
    assert pipeline.running == 0


async def test_a_reader_that_is_cancelled_ends_all_choices():
    pipeline = FakePipeline(5)

    async def read():
        async with aclosing(generate_all(pipeline, [request()] * 5)) as chunks:
            async for _ in chunks:
                pass

    reading = asyncio.create_task(read())
    await until(lambda: pipeline.running == 5)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert pipeline.running == 0


@pytest.mark.parametrize("count", [1, 5])
async def test_the_first_failure_ends_all_choices(count):
    pipeline = FakePipeline(count, fails_at=(0, 1))
    pipeline.gates[0].release()
    pipeline.gates[0].release()
    with pytest.raises(InvalidRequestError, match="refused"):
        async for _ in generate_all(pipeline, [request()] * count):
            pass
    assert pipeline.running == 0


async def test_unread_choices_wait():
    pipeline = FakePipeline(4, length=1000)
    pipeline.open()
    async with aclosing(generate_all(pipeline, [request()] * 4)) as chunks:
        await anext(chunks)
        for _ in range(1000):
            await asyncio.sleep(0)
        left = sum(gate._value for gate in pipeline.gates)
    assert left > 4 * 1000 - 50


def test_each_choice_has_a_seed_derived_from_the_given_one():
    seeds = [choice.sampling["seed"] for choice in choices_of(request(sampling={"seed": 5, "top_k": 2}), 16)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [choice_seed(5, index) for index in range(16)]
    assert choices_of(request(sampling={"top_k": 2}), 2) == [request(sampling={"top_k": 2})] * 2


HEAD = {"id": "cmpl-1", "created": 5, "model": 'a "model"', "object": "text_completion"}


@pytest.mark.parametrize(
    ("shape", "request_of"),
    [
        (CompletionFormat, CompletionRequest(prompt="p", stream=True)),
        (ChatFormat, ChatCompletionRequest(messages=[{"role": "user", "content": "Hello."}], stream=True)),
    ],
    ids=["completion", "chat"],
)
@pytest.mark.parametrize("includes_usage", [False, True], ids=["without usage", "with usage"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), index=st.integers(0, 3))
def test_an_event_with_only_text_equals_the_encoded_one(shape, request_of, includes_usage, text, index):
    request = request_of.model_copy(update={"stream_options": StreamOptions(include_usage=includes_usage)})
    written, usage = _Events(HEAD, request, shape(request), None), {"usage": None} if includes_usage else {}
    written.of(index, text_chunk("first", [1]))
    head = HEAD | {"object": shape.chunk_object}
    expected = event(head | {"choices": [shape(request).chunk(index, text_chunk(text, [1]), False)]} | usage)
    for _ in range(2):
        assert written.of(index, text_chunk(text, [1])) == expected
    assert orjson.loads(expected.removeprefix(b"data: "))["choices"][0]["index"] == index


@pytest.mark.parametrize("stage", ["", "c"])
def test_a_call_that_begins_with_the_answers_end_has_an_event_of_its_own(stage):
    """OpenAI's client says that a call is complete only if the end comes after its beginning."""
    call = [CallStart(0, "call-1", "find"), CallArguments(0, '{"a": 1}')]
    last = text_chunk("", [1], "stop", parts=call, repeated=bool(stage), fingerprint="0" * 32)
    point = ResumePoint("0" * 32, 1, 0, stage)
    identity = AnswerIdentity(Signer(b"secret"), b"n" * 12, 1, b"body", point if stage else None)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hello."}], stream=True)
    blocks = _Events(HEAD, request, ChatFormat(request), identity).of(0, last).decode().split("\n\n")[:-1]
    ids, choices = [], []
    for block in blocks:
        first, second = block.split("\n")
        ids.append(first.split(".")[1])
        (choice,) = json.loads(second.removeprefix("data: "))["choices"]
        choices.append((choice["finish_reason"], choice["delta"].keys() & {"tool_calls"}))
    assert list(zip(ids, choices, strict=True)) == [
        *([("1c", (None, {"tool_calls"}))] if not stage else []),  # Whoever has the call gets the end alone.
        ("1f", ("tool_calls", set())),
    ]


def test_no_event_has_a_character_that_ends_a_line_elsewhere():
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1cé\r\n"
    written = event({"type": "t", "x": text})
    assert len(written.decode().splitlines()) == 2
    assert json.loads(written.removeprefix(b"data: "))["x"] == text
