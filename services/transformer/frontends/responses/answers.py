"""Answers as the Responses API writes them: one response with one message, or the events of a stream.

Each event has the next `sequence_number`. A stream ends in `response.completed`, in `response.incomplete` where the
maximum of tokens ended it, or in `response.failed`. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from itertools import count
from typing import Any

import orjson
from google.api.httpbody_pb2 import HttpBody

from millrace.errors import MillraceError
from millrace_protos.millrace_pb2 import Usage
from services.transformer.frontends.http import EVENTS, json_body, named_event
from services.transformer.frontends.responses.requests import ResponsesRequest
from services.transformer.generation.chunks import TextChunk, joined

_PLACE = {"output_index": 0, "content_index": 0}
_DELTA = "response.output_text.delta"


class ResponseAnswer:
    """Writes one answer; `head` has the fields that it has from its beginning to its end."""

    def __init__(self, response_id: str, created: int, request: ResponsesRequest) -> None:
        self.head = head_of(response_id, created, request.model) | {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "store": request.store,
            "temperature": request.extra.get("temperature"),
            "text": {"format": request.text.format},
            "top_p": request.extra.get("top_p"),
        }
        self._numbers = count()
        self._item_id = message_id(response_id)
        around = named_event({"type": _DELTA, "item_id": self._item_id, **_PLACE, "logprobs": []})
        self._delta_before = around.removesuffix(b"}\n\n") + b',"sequence_number":'

    async def whole(self, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
        """The response as one body."""
        chunk = joined([chunk async for chunk in chunks])
        yield json_body(self.head | ended(self._item_id, chunk.text, chunk.finish_reason, chunk.usage))

    async def events(self, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
        """The response as events; those of one chunk are one body."""
        begun, text = False, []
        async for chunk in chunks:
            written = b""
            if not begun:
                begun = True
                written = self._begin()
            if chunk.text:
                text.append(chunk.text)
                number = b"%d" % next(self._numbers)
                written += self._delta_before + number + b',"delta":' + orjson.dumps(chunk.text) + b"}\n\n"
            if chunk.finish_reason is not None:
                written += self._end("".join(text), chunk)
            if written:
                yield HttpBody(content_type=EVENTS, data=written)

    def failed(self, error: MillraceError) -> bytes:
        """The event of an error."""
        kind = "server_error" if error.http_status >= 500 else "invalid_prompt"
        failure = {"status": "failed", "error": {"code": kind, "message": error.message}}
        return self._event("response.failed", {"response": self.head | failure})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return named_event({"type": kind, "sequence_number": next(self._numbers), **fields})

    def _begin(self) -> bytes:
        item = message(self._item_id, "in_progress", [])
        part = {"item_id": self._item_id, **_PLACE, "part": output_text("")}
        return (
            self._event("response.created", {"response": self.head})
            + self._event("response.in_progress", {"response": self.head})
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
            + self._event("response.content_part.added", part)
        )

    def _end(self, text: str, chunk: TextChunk) -> bytes:
        response = self.head | ended(self._item_id, text, chunk.finish_reason, chunk.usage)
        place = {"item_id": self._item_id, **_PLACE}
        return (
            self._event("response.output_text.done", place | {"text": text, "logprobs": []})
            + self._event("response.content_part.done", place | {"part": output_text(text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": response["output"][0]})
            + self._event(f"response.{response['status']}", {"response": response})
        )


def head_of(response_id: str, created: int, model: str) -> dict[str, Any]:
    """The fields of any response, before its output."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
    }


def message_id(response_id: str) -> str:
    return "msg_" + response_id.removeprefix("resp_")


def ended(item_id: str, text: str, finish_reason: str | None, usage: Usage | None) -> dict[str, Any]:
    """The fields that the end of an answer adds or changes."""
    usage = usage or Usage()
    status = "incomplete" if finish_reason == "length" else "completed"
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [message(item_id, status, [output_text(text)])],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
