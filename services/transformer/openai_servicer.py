"""OpenAI's completions and chat completions.

`stream: true` answers with server-sent events ending in `data: [DONE]`.
Source: OpenAI's API reference for the shapes of answers, chunks and errors.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.api.httpbody_pb2 import HttpBody

from millrace.errors import MillraceError
from millrace.interceptors import Context
from millrace.protos import rest_pb2_grpc
from millrace.protos.millrace_pb2 import Usage
from services.transformer.calls import request_id_of, rest_timeout_s
from services.transformer.openai_requests import ChatCompletionRequest, CompletionRequest, parse
from services.transformer.pipeline import Origin, Pipeline, TextRequest
from services.transformer.rest import EVENTS, event, json_body, rest_errors

_DONE = b"data: [DONE]\n\n"
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(error: MillraceError) -> dict[str, Any]:
    """The body of OpenAI's errors."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    kind = _ERROR_TYPES.get(error.http_status, kind)
    return {"error": {"message": error.message, "type": kind, "code": error.status.name.lower(), "param": None}}


@dataclass(frozen=True)
class _Shape:
    """How one of the two APIs writes its answers."""

    id_prefix: str
    whole: str
    chunk: str
    whole_choice: Callable[[str], dict[str, Any]]
    chunk_choice: Callable[[str, bool], dict[str, Any]]  # Text, and whether it is the first.


def _chat_delta(text: str, first: bool) -> dict[str, Any]:
    return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}


_COMPLETION = _Shape(
    "cmpl", "text_completion", "text_completion", lambda text: {"text": text}, lambda text, _: {"text": text}
)
_CHAT = _Shape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    _chat_delta,
)


class OpenAIServicer(rest_pb2_grpc.OpenAIServicer):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @rest_errors(openai_error)
    async def Completions(self, request: HttpBody, context: Context) -> AsyncGenerator[HttpBody, None]:
        origin = Origin("millrace.rest.v1.OpenAI/Completions", request_id_of(context))
        with self._pipeline.recording_refusals(origin):
            asked = parse(CompletionRequest, request.data)
        text = _text_request(asked, origin, context, prompt=asked.prompt)
        async with aclosing(self._answer(text, asked, _COMPLETION)) as bodies:
            async for body in bodies:
                yield body

    @rest_errors(openai_error)
    async def ChatCompletions(self, request: HttpBody, context: Context) -> AsyncGenerator[HttpBody, None]:
        origin = Origin("millrace.rest.v1.OpenAI/ChatCompletions", request_id_of(context))
        with self._pipeline.recording_refusals(origin):
            asked = parse(ChatCompletionRequest, request.data)
        messages = [(message.role, message.text) for message in asked.messages]
        text = _text_request(asked, origin, context, messages=messages)
        async with aclosing(self._answer(text, asked, _CHAT)) as bodies:
            async for body in bodies:
                yield body

    async def _answer(
        self, text: TextRequest, asked: CompletionRequest | ChatCompletionRequest, shape: _Shape
    ) -> AsyncGenerator[HttpBody, None]:
        head = {"id": f"{shape.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        async with aclosing(self._pipeline.generate(text)) as chunks:
            if not asked.stream:
                whole = [chunk async for chunk in chunks]
                choice = shape.whole_choice("".join(chunk.text for chunk in whole))
                choice |= {"index": 0, "logprobs": None, "finish_reason": whole[-1].finish_reason}
                yield json_body(head | {"object": shape.whole, "choices": [choice], "usage": _usage(whole[-1].usage)})
                return
            head["object"] = shape.chunk
            first, usage = True, None
            # With include_usage every event has the field; the last one fills it.
            no_usage = {"usage": None} if asked.include_usage else {}
            async for chunk in chunks:
                usage = chunk.usage
                # Text that is held back makes no event of its own.
                if first or chunk.text or chunk.finish_reason is not None:
                    choice = shape.chunk_choice(chunk.text, first)
                    choice |= {"index": 0, "logprobs": None, "finish_reason": chunk.finish_reason}
                    yield HttpBody(content_type=EVENTS, data=event(head | {"choices": [choice]} | no_usage))
                    first = False
            if asked.include_usage:
                yield HttpBody(data=event(head | {"choices": [], "usage": _usage(usage)}))
            yield HttpBody(data=_DONE)


def _text_request(
    asked: CompletionRequest | ChatCompletionRequest, origin: Origin, context: Context, **prompt: Any
) -> TextRequest:
    return TextRequest(
        origin=origin,
        model=asked.model,
        sampling=asked.sampling(),
        stop=asked.stops,
        timeout_s=rest_timeout_s(context),
        **prompt,
    )


def _usage(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
