"""Answers as the Responses API writes them: one response with its output, or the events of a stream.

Each event has the next `sequence_number`. A stream ends in `response.completed`, in `response.incomplete` where the
maximum of tokens ended it, or in `response.failed`. Source: OpenAI's API reference.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate, chain, zip_longest
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
from headrace_transformer.text.answer_parts import Content, Part, merged


class ResponseAnswer:
    """Writes one answer; `head` has the fields that it has from its beginning to its end.

    The log probabilities of a text are those of its tokens, the end's among them, and not those of marks before it.
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
        self._scores: list[dict[str, Any]] = []  # Of tokens that have added no part yet.

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
        """The events of a chunk's parts; with log probabilities those of each token, for it may add more than one."""
        if not self._has_scores:
            return b"".join(map(self._output.take, chunk.parts))
        scores: list[list[dict[str, Any]]] = [[], *([score] for score in token_scores(chunk))]
        if chunk.answer is None:
            written = self._take([*chain(*scores)], chunk.parts, has_marks=False)
        else:
            steps = zip_longest(scores, map(merged, chunk.answer.steps), fillvalue=())
            written = b"".join(self._take(new, parts, has_marks=True) for new, parts in steps)
        if chunk.end is not None:
            self._output.add_scores(self._scores)
        return written

    def _take(self, scores: Sequence[dict[str, Any]], parts: Sequence[Part], has_marks: bool) -> bytes:
        """The events of the parts that tokens add; of several texts the last one has their scores."""
        own = [*self._scores, *scores]
        self._scores = [] if parts else own
        text = next((part for part in reversed(parts) if isinstance(part, Content)), None)
        if text is not None and has_marks:
            own = scores_of(text.text, own)
        return b"".join(self._output.take(part, own if part is text else ()) for part in parts)

    def _end(self, chunk: TextChunk, end: End) -> bytes:
        status = status_of(end.reason)
        written = self._output.end(status)
        return written + self._output.event(f"response.{status}", {"response": self._ended(chunk, end)})

    def _ended(self, chunk: TextChunk, end: End) -> dict[str, Any]:
        """The whole response, with its last chunk."""
        status = status_of(end.reason)
        output, reasoning_tokens = self._output.whole(status), chunk.answer and chunk.answer.reasoning_tokens
        return self.head | ended(status, output, end.usage, reasoning_tokens)


def scores_of(text: str, scores: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The scores of a text's tokens, without those of marks before them; all where the tokens have not the text."""
    begin = bytes(chain.from_iterable(one["bytes"] for one in scores)).rfind(text.encode())
    ends = accumulate(len(one["bytes"]) for one in scores)
    return [one for one, end in zip(scores, ends, strict=True) if end > begin]


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
