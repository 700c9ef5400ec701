"""Several choices of one request run side by side, end together, and are the same for the same seed."""

import asyncio
from contextlib import aclosing

import pytest

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.bodies import generate_all
from headrace_transformer.frontends.openai.generation_requests import choice_seed, choices_of
from headrace_transformer.generation.requests import TextRequest
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


@pytest.mark.parametrize("count", [1, 2, 40])
async def test_every_chunk_of_every_choice_comes_with_its_number_and_in_order(count):
    pipeline = FakePipeline(count, length=30)
    pipeline.open()
    texts = [[] for _ in range(count)]
    async for index, made in generate_all(pipeline, [request()] * count):
        texts[index].append(made.text)
    assert texts == [[f"{index}.{step}" for step in range(30)] for index in range(count)]
    assert pipeline.running == 0


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
