"""Answers as HTTP bodies: one of JSON, or server-sent events ending in `data: [DONE]`.

Several generations of one request run side by side. Choices of a request without a seed have those of the answer's own.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from google.api.httpbody_pb2 import HttpBody

from headrace_transformer.frontends.http import EVENTS, event, event_json, json_body
from headrace_transformer.frontends.openai.answers import Format, has_call, usage_of
from headrace_transformer.frontends.openai.generation_requests import GenerationRequest, choice_seed
from headrace_transformer.generation.chunks import TextChunk, joined
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import AnswerIdentity, ResumeIds, Stage
from headrace_transformer.predictors import CONTINUITY, TokenChunk

_DONE = b"data: [DONE]\n\n"
# Log probabilities and echoed ids that are written at once; more of them take longer than others should wait.
_MAX_WRITTEN_AT_ONCE = 2048
T = TypeVar("T")
_MARK = uuid.uuid4().hex  # Stands for the text of an event, and is nowhere else in it.
_UNREAD_CHUNKS = 16  # Beyond these, choices wait for the reader, and their own slots merge.


async def answer(
    pipeline: Pipeline,
    generations: Sequence[TextRequest],
    request: GenerationRequest,
    shape: Format,
    identity: AnswerIdentity,
) -> AsyncGenerator[HttpBody, None]:
    """Runs the generations, one a choice, and writes what they make; closing the generator cancels them.

    Where the client has a part of the answer, only the rest is written.
    """
    head = {"id": f"{shape.id_prefix}-{identity.answer_id}", "created": identity.created, "model": request.model}
    generations = [
        replace(request, default_seed=choice_seed(identity.seed, index), resume=identity.resume)
        for index, request in enumerate(generations)
    ]
    async with aclosing(generate_all(pipeline, generations)) as chunks:
        if not request.stream:
            made: list[list[TextChunk]] = [[] for _ in generations]
            async for index, chunk in chunks:
                made[index].append(chunk)
            size = sum(shape.size(one, not number) for chunks in made for number, one in enumerate(chunks))
            yield await _aside_if_large(size, partial(_whole, head, made, request.n, shape))
            return
        # An id counts the tokens of one answer.
        is_single = len(generations) == 1 and not generations[0].prompt_only
        events = _Events(head, request, shape, identity if identity.has_ids and is_single else None)
        running, last = len(generations), b""
        async for index, chunk in chunks:
            if events.begins(index) or chunk.tokens.prompt is not None:
                written = await _aside_if_large(shape.size(chunk, True), partial(events.of, index, chunk))
            else:
                written = events.of(index, chunk)
            running -= chunk.end is not None
            if not running:
                last = written  # It goes out together with what follows it at once.
            elif written:
                yield HttpBody(content_type=EVENTS, data=written)
        yield HttpBody(content_type=EVENTS, data=last + events.end())


async def _aside_if_large(size: int, write: Callable[[], T]) -> T:
    """The result of `write`, in a thread where it writes many numbers; see `Format.size`."""
    return await asyncio.to_thread(write) if size > _MAX_WRITTEN_AT_ONCE else write()


def _whole(head: dict[str, Any], made: Sequence[Sequence[TextChunk]], n: int, shape: Format) -> HttpBody:
    choices = [shape.whole(index, joined(chunks)) for index, chunks in enumerate(made)]
    fields = {"object": shape.whole_object, "choices": choices, "usage": usage_of([chunks[-1] for chunks in made], n)}
    return json_body(head | fields | shape.beside(made[0][0]))


class _Events:
    """Writes the events of a stream; they have ids if the answer has an `identity`."""

    def __init__(
        self, head: dict[str, Any], request: GenerationRequest, shape: Format, identity: AnswerIdentity | None
    ) -> None:
        self._head = head | {"object": shape.chunk_object}
        self._shape = shape
        self._n = request.n
        self._ids = None if identity is None else ResumeIds(identity)
        resume = None if identity is None else identity.resume
        self._stage: Stage = "" if resume is None else resume.stage
        # With include_usage every event has the field; the last one fills it.
        self._usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        self._ends_with_usage = request.include_usage and self._stage != "u"
        self._counts = request.continuous_usage
        self._returns_ids = request.return_token_ids
        self._latest: dict[int, TextChunk] = {}  # By choice.
        self._tokens: dict[int, int] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # By choice: what is before and after the text.

    def begins(self, index: int) -> bool:
        """Whether nothing of a choice has been written."""
        return index not in self._latest

    def of(self, index: int, chunk: TextChunk) -> bytes:
        """The event of a chunk; empty for one whose text is held back, or that the client has.

        A comment before it says how the answer went on after its engine failed: clients ignore comments.
        """
        if chunk.tokens.continuity:
            return b": %s: %s\n\n" % (CONTINUITY.encode(), chunk.tokens.continuity.encode()) + self._of(index, chunk)
        return self._of(index, chunk)

    def _of(self, index: int, chunk: TextChunk) -> bytes:
        tokens, is_first = chunk.tokens, index not in self._latest
        self._latest[index] = chunk
        if self._ids is not None:
            self._ids.take(tokens.fingerprint, tokens.token_ids)
        reports_tokens = bool(tokens.logprobs) or self._returns_ids
        if not (is_first or reports_tokens or self._counts or tokens.repeated or chunk.answer or chunk.end):
            return self._line() + self._plain_event(index, chunk) if chunk.text else b""
        if self._counts:
            self._tokens[index] = self._tokens.get(index, 0) + len(tokens.token_ids)
        if not (is_first or reports_tokens or chunk.parts or chunk.end):
            return b""
        choice = self._shape.chunk(index, chunk, is_first)
        lacks_end = chunk.end is not None and self._stage == "c"
        if tokens.repeated and not lacks_end:
            return b""
        if self._counts:
            prompt, completion = len(chunk.origin.prompt_ids), self._tokens[index]  # Until now, as vLLM writes it.
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            self._usage["usage"] = counts
        beside = self._shape.beside(chunk) if is_first else {}
        if chunk.end is None:
            return self._event("", choice, beside)
        if not (lacks_end or has_call(chunk.parts)):
            return self._event("f", choice, beside)
        # OpenAI's client misses the end of a call that begins in the event of the answer's end.
        begun, end = self._shape.before_end(choice)
        return (b"" if lacks_end else self._event("c", begun, beside)) + self._event("f", end, {})

    def _event(self, stage: Stage, choice: dict[str, Any], beside: dict[str, Any]) -> bytes:
        return self._line(stage) + event(self._head | {"choices": [choice]} | self._usage | beside)

    def end(self) -> bytes:
        """What follows the last event of a choice."""
        if not self._ends_with_usage:
            return _DONE
        usage = usage_of([self._latest[index] for index in sorted(self._latest)], self._n)
        return self._line("u") + event(self._head | {"choices": [], "usage": usage}) + _DONE

    def _line(self, stage: Stage = "") -> bytes:
        return b"" if self._ids is None else self._ids.line(stage)

    def _plain_event(self, index: int, chunk: TextChunk) -> bytes:
        """An event that has nothing but new text, as nearly all have: the rest of it is encoded once for a choice."""
        around = self._plain.get(index)
        if around is None:
            marked = self._shape.chunk(index, chunk._replace(text=_MARK, tokens=TokenChunk()), False)
            written = event(self._head | {"choices": [marked]} | self._usage)
            before, _, after = written.partition(b'"' + _MARK.encode() + b'"')
            around = self._plain[index] = before, after
        return around[0] + event_json(chunk.text) + around[1]


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
