"""Answers as HTTP bodies: one of JSON, or server-sent events ending in `data: [DONE]`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec

from google.api.httpbody_pb2 import HttpBody

from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.http import EVENTS, event, event_json, json_body
from headrace_transformer.frontends.openai.answers import Format, reasoning_usage, usage_of, usage_so_far
from headrace_transformer.frontends.openai.choices import choices_in, generate_all
from headrace_transformer.frontends.openai.generation_requests import GenerationRequest
from headrace_transformer.generation.chunks import TextChunk
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import AnswerIdentity, ResumeIds

_DONE = b"data: [DONE]\n\n"
# Numbers of a scored prompt that are written at once; more of them take longer than others should wait.
_MAX_WRITTEN_AT_ONCE = 2048
_P = ParamSpec("_P")
_MARK = uuid.uuid4().hex  # Stands for the text of an event, and is nowhere else in it.


async def _written(first: TextChunk, write: Callable[_P, dict[str, Any]], *given: _P.args, **named: _P.kwargs) -> Any:
    """What `write` makes of the arguments, in a thread where much of a prompt's is in the choice's `first` chunk."""
    scored = first.prompt
    if scored is None or scored.logprobs.chosen.size + scored.logprobs.top.size <= _MAX_WRITTEN_AT_ONCE:
        return write(*given, **named)
    return await asyncio.to_thread(write, *given, **named)


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
    resume = identity.resume
    generations = choices_in(generations, identity)
    async with aclosing(generate_all(pipeline, generations)) as chunks:
        if not request.stream:
            made: list[list[TextChunk]] = [[] for _ in generations]
            async for index, chunk in chunks:
                made[index].append(chunk)
            choices = [await _written(parts[0], shape.whole, index, parts) for index, parts in enumerate(made)]
            total = usage_of([parts[-1].usage or Usage() for parts in made], request.n)
            total |= reasoning_usage(parts[-1].reasoning_tokens for parts in made)
            beside = await _written(made[0][0], shape.beside, made[0][0])
            yield json_body(head | {"object": shape.whole_object, "choices": choices, "usage": total} | beside)
            return

        head["object"] = shape.chunk_object
        begun: set[int] = set()
        usages = [Usage()] * len(generations)
        completion_tokens = [0] * len(generations)
        reasoning_tokens: list[int | None] = [None] * len(generations)
        # With include_usage every event has the field; the last one fills it.
        usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        continuous_usage, returns_ids = request.continuous_usage, request.return_token_ids
        reports_all = continuous_usage or returns_ids
        plain = _PlainEvents(head, usage, shape)
        # An id counts the tokens of one answer.
        is_single = len(generations) == 1 and not generations[0].prompt_only
        ids = ResumeIds(identity) if identity.has_ids and is_single else None
        running, last = len(generations), b""
        async for index, chunk in chunks:
            usages[index] = chunk.usage or usages[index]
            completion_tokens[index] += len(chunk.token_ids)
            reasoning_tokens[index] = chunk.reasoning_tokens
            is_first = index not in begun
            if ids is not None:
                ids.take(chunk.fingerprint, chunk.token_ids)
            # Text that is held back makes no event of its own, unless its tokens have log probabilities
            # or ids to report.
            # What is repeated makes none either, but is counted.
            if chunk.repeated:
                begun.add(index)
                await _written(chunk, shape.chunk, index, chunk, is_first)
                running -= chunk.finish_reason is not None
            elif not (is_first or reports_all or chunk.logprobs or chunk.finish_reason is not None):
                if chunk.parts is None and chunk.text:
                    line = b"" if ids is None else ids.line()
                    yield HttpBody(content_type=EVENTS, data=line + plain.event(index, chunk.text))
                elif chunk.parts:
                    line = b"" if ids is None else ids.line()
                    written = event(head | {"choices": [shape.chunk(index, chunk, False)]} | usage)
                    yield HttpBody(content_type=EVENTS, data=line + written)
            elif is_first or chunk.has_news or chunk.finish_reason is not None or chunk.logprobs or returns_ids:
                begun.add(index)
                choice = await _written(chunk, shape.chunk, index, chunk, is_first)
                if continuous_usage:
                    usage["usage"] = usage_so_far(chunk.prompt_tokens, completion_tokens[index])
                line = b"" if ids is None else ids.line("" if chunk.finish_reason is None else "f")
                beside = shape.beside_first(chunk) if is_first else {}
                written = line + event(head | {"choices": [choice]} | usage | beside)
                running -= chunk.finish_reason is not None
                if running:
                    yield HttpBody(content_type=EVENTS, data=written)
                else:
                    last = written  # It goes out together with what follows it at once.
        if request.include_usage and (resume is None or resume.stage != "u"):
            last += b"" if ids is None else ids.line("u")
            total = usage_of(usages, request.n) | reasoning_usage(reasoning_tokens)
            last += event(head | {"choices": [], "usage": total})
        yield HttpBody(content_type=EVENTS, data=last + _DONE)


class _PlainEvents:
    """Writes the events of a stream that have nothing but new text, which are nearly all of them.

    All but the text is the same for every such event of a choice, so it is encoded once.
    """

    def __init__(self, head: dict[str, Any], usage: dict[str, Any], shape: Format) -> None:
        self._head = head
        self._usage = usage
        self._shape = shape
        self._around: dict[int, tuple[bytes, bytes]] = {}  # Before and after the text, by choice.

    def event(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._encoded(index)
        return around[0] + event_json(text) + around[1]

    def _encoded(self, index: int) -> tuple[bytes, bytes]:
        choice = self._shape.chunk(index, TextChunk(_MARK, [], [], []), False)
        before, _, after = event(self._head | {"choices": [choice]} | self._usage).partition(
            b'"' + _MARK.encode() + b'"'
        )
        return before, after
