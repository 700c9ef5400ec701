"""Answers as the Responses API writes them: one response with its output, or the events of a stream.

Each event has the next `sequence_number`. A stream ends in `response.completed`, in `response.incomplete` where the
maximum of tokens ended it, or in `response.failed`. Source: OpenAI's API reference.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from google.api.httpbody_pb2 import HttpBody

from headrace.errors import HeadraceError
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.http import EVENTS, json_body
from headrace_transformer.frontends.openai.answers import token_scores
from headrace_transformer.frontends.responses.items import ItemFields, Output
from headrace_transformer.frontends.responses.requests import ResponsesRequest
from headrace_transformer.frontends.responses.tools import flat_tool, written_choice
from headrace_transformer.generation.chunks import End, TextChunk
from headrace_transformer.text.answer_parts import Content


class ResponseAnswer:
    """Writes one answer; `head` has the fields that it has from its beginning to its end.

    The tokens of a text have its log probabilities, as the engine's steps bring both.
    """

    def __init__(self, response_id: str, created: int, request: ResponsesRequest) -> None:
        self.head = head_of(response_id, created, request.model) | {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "store": request.store,
            "temperature": request.extra.get("temperature"),
            "text": {"format": request.text.format},
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "tool_choice": written_choice(request.tool_choice),
            "tools": [flat_tool(function.definition, request.origins) for function in request.tools],
            "top_p": request.extra.get("top_p"),
            "truncation": request.truncation,
        }
        self._output = Output(response_id, ItemFields(request.origins, request.has_encrypted_reasoning))
        self._has_scores = request.has_logprobs
        self._scores: list[dict[str, Any]] = []  # Of tokens whose text is not there yet.

    async def whole(self, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
        """The response as one body."""
        async for chunk in chunks:
            self._take_all(chunk)
            if chunk.end is not None:
                yield json_body(self._ended(chunk, chunk.end))

    async def events(self, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
        """The response as events; those of one chunk are one body."""
        begun = False
        async for chunk in chunks:
            written = b""
            if not begun:
                begun = True
                written = self._output.event("response.created", {"response": self.head})
                written += self._output.event("response.in_progress", {"response": self.head})
            written += self._take_all(chunk)
            if chunk.end is not None:
                written += self._end(chunk, chunk.end)
            if written:
                yield HttpBody(content_type=EVENTS, data=written)

    def failed(self, error: HeadraceError) -> bytes:
        """The event of an error."""
        kind = "server_error" if error.http_status >= 500 else "invalid_prompt"
        failure = {"status": "failed", "error": {"code": kind, "message": error.message}}
        return self._output.event("response.failed", {"response": self.head | failure})

    def _take_all(self, chunk: TextChunk) -> bytes:
        """The events of a chunk's parts; the scores of its tokens are those of its last text."""
        if self._has_scores:
            self._scores += token_scores(chunk)
        texts = [number for number, part in enumerate(chunk.parts) if isinstance(part, Content)]
        written = b""
        for number, part in enumerate(chunk.parts):
            is_scored = bool(texts) and number == texts[-1]
            written += self._output.take(part, self._scores if is_scored else ())
            if is_scored or not texts:
                self._scores = []
        return written

    def _end(self, chunk: TextChunk, end: End) -> bytes:
        status = status_of(end.reason)
        written = self._output.end(status)
        return written + self._output.event(f"response.{status}", {"response": self._ended(chunk, end)})

    def _ended(self, chunk: TextChunk, end: End) -> dict[str, Any]:
        """The whole response, with its last chunk."""
        status = status_of(end.reason)
        output, reasoning_tokens = self._output.whole(status), chunk.answer and chunk.answer.reasoning_tokens
        return self.head | ended(status, output, end.usage, reasoning_tokens)


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
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }


def status_of(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def ended(
    status: str, output: list[dict[str, Any]], usage: Usage | None, reasoning_tokens: int | None
) -> dict[str, Any]:
    """The fields that the end of an answer adds or changes."""
    usage = usage or Usage()
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }
