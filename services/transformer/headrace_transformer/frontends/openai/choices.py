"""Several generations of one request, side by side: each choice is one, with a seed of its own.

The first choice has the seed given, choice i of the others a hash of (seed, i), so that the same
request gives the same choices. Without a seed they have those of the answer's own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import AnswerIdentity

_UNREAD_CHUNKS = 16  # Beyond these, choices wait for the reader, and their own slots merge.

_MAX_SEED = 64  # Characters.


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: 63 bits, but for the first, whose seed is the one given."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def choices_of(request: TextRequest, n: int) -> list[TextRequest]:
    """The request n times, with the seeds of its choices; what is made of its prompt is made once for all."""
    seed: Any = request.sampling.get("seed")
    is_seed = isinstance(seed, (int, float)) or (isinstance(seed, str) and len(seed) <= _MAX_SEED)
    if n == 1 or not is_seed:  # What is none is refused later.
        return [request] * n
    return [replace(request, sampling={**request.sampling, "seed": choice_seed(seed, i)}) for i in range(n)]


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
