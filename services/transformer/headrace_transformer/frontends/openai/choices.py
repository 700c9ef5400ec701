"""Several generations of one request, side by side: each choice is one, with a seed of its own.

Choices of a request without a seed have those of the answer's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from headrace_transformer.frontends.openai.generation_requests import choice_seed
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import AnswerIdentity

_UNREAD_CHUNKS = 16  # Beyond these, choices wait for the reader, and their own slots merge.


def choices_in(requests: Sequence[TextRequest], identity: AnswerIdentity) -> list[TextRequest]:
    """The requests of an answer, as its identity has them: those without a seed get one made of the answer's own."""
    return [
        replace(request, default_seed=choice_seed(identity.seed, index), resume=identity.resume)
        for index, request in enumerate(requests)
    ]


async def generate_all(
    pipeline: Pipeline, requests: Sequence[TextRequest]
) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """The chunks of all requests as they come, each with its request's number.

    The first failure ends all of them, and closing the generator cancels all.
    """
    if len(requests) == 1:
        async with aclosing(pipeline.generate(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return

    made: asyncio.Queue[tuple[int, TextChunk] | Exception | None] = asyncio.Queue(_UNREAD_CHUNKS)

    async def generate(index: int) -> None:
        async with aclosing(pipeline.generate(requests[index])) as chunks:
            async for chunk in chunks:
                await made.put((index, chunk))

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(requests)):
                    group.create_task(generate(index), name=f"choice-{index}")
        except ExceptionGroup as failures:
            await made.put(failures.exceptions[0])
        else:
            await made.put(None)

    running = asyncio.create_task(run(), name="choices")
    try:
        while (item := await made.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
