"""Answers as Anthropic writes them: one message, or the events of a stream.

`input_tokens` are those of the prompt that were computed, `cache_read_input_tokens` those that came from the cache. The
first event of a stream counts all of them as computed. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from google.api.httpbody_pb2 import HttpBody

from millrace_protos.millrace_pb2 import Usage
from services.transformer.frontends.http import EVENTS, json_body, named_event
from services.transformer.generation.chunks import TextChunk, joined

_TEXT_BEFORE = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
_TEXT_BEFORE += b'"delta":{"type":"text_delta","text":'
_TEXT_AFTER = b"}}\n\n"


async def whole(answer_id: str, model: str, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
    """The message as one body."""
    chunk = joined([chunk async for chunk in chunks])
    content = [{"type": "text", "text": chunk.text, "citations": None}]
    yield json_body(_message(answer_id, model, _usage(chunk)) | {"content": content} | _end(chunk))


async def events(answer_id: str, model: str, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
    """The message as events; those of one chunk are one body."""
    begun = False
    async for chunk in chunks:
        written = b""
        if not begun:
            begun = True
            usage = {"input_tokens": chunk.prompt_tokens, "output_tokens": 0}
            block = {"type": "text", "text": "", "citations": None}
            written = named_event({"type": "message_start", "message": _message(answer_id, model, usage)})
            written += named_event({"type": "content_block_start", "index": 0, "content_block": block})
            written += named_event({"type": "ping"})
        if chunk.text:
            written += _TEXT_BEFORE + orjson.dumps(chunk.text) + _TEXT_AFTER
        if chunk.finish_reason is not None:
            written += named_event({"type": "content_block_stop", "index": 0})
            written += named_event({"type": "message_delta", "delta": _end(chunk), "usage": _usage(chunk)})
            written += named_event({"type": "message_stop"})
        if written:
            yield HttpBody(content_type=EVENTS, data=written)


def _message(answer_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _end(chunk: TextChunk) -> dict[str, Any]:
    """Why the answer ended; a stop token is not a stop sequence."""
    if chunk.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(chunk.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(chunk: TextChunk) -> dict[str, Any]:
    usage = chunk.usage or Usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
