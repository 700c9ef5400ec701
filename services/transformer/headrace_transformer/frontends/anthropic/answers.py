"""Answers as Anthropic writes them: one message, or the events of a stream.

A block has the parts of an answer that belong together; the next one begins where `begins_segment` has it. The
signature of reasoning is empty. The input of a call whose arguments are cut has what of them is whole, as Anthropic's
clients read a stream; it is empty where they are not JSON. `input_tokens` are those of the prompt that were computed,
`cache_read_input_tokens` those that came from the cache. The first event of a stream counts all of them as computed.
Source: Anthropic's API reference.

Errors have the same source: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

All models that generate text are one page of a list.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from google.api.httpbody_pb2 import HttpBody
from pydantic_core import from_json, to_json

from headrace.errors import HeadraceError
from headrace.telemetry.identity import current_request_id
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.http import EVENTS, JSON, event_json, named_event, page_of
from headrace_transformer.generation.chunks import End, TextChunk, joined
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning, begins_segment

_NOT_CREATED = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}  # The cache's tokens have no lifetime.
# By a block's type, that of its deltas and their field.
_DELTAS = {
    "tool_use": ("input_json_delta", "partial_json"),
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


async def whole(answer_id: str, model: str, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
    """The message as one body."""
    chunk = joined([chunk async for chunk in chunks])
    content = _blocks_of(chunk.parts or [Content("")])
    end = {} if chunk.end is None else _end(chunk.end, any(block["type"] == "tool_use" for block in content))
    message = _message(answer_id, model, _usage_of(chunk)) | {"content": content} | end
    # A call's input may have integers of more than 64 bits, which orjson refuses.
    yield HttpBody(content_type=JSON, data=to_json(message, inf_nan_mode="null"))


async def events(answer_id: str, model: str, chunks: AsyncIterator[TextChunk]) -> AsyncGenerator[HttpBody, None]:
    """The message as events; those of one chunk are one body."""
    begun, blocks = False, _BlockEvents()
    async for chunk in chunks:
        written = b""
        if not begun:
            begun = True
            usage = _usage(Usage(prompt_tokens=len(chunk.origin.prompt_ids)))
            written = named_event({"type": "message_start", "message": _message(answer_id, model, usage)})
            written += named_event({"type": "ping"})
        for part in chunk.parts:
            written += blocks.take(part)
        if chunk.end is not None:
            written += blocks.end()
            end = {"type": "message_delta", "delta": _end(chunk.end, blocks.has_call), "usage": _usage_of(chunk)}
            written += named_event(end) + named_event({"type": "message_stop"})
        if written:
            yield HttpBody(content_type=EVENTS, data=written)


class _BlockEvents:
    """Writes the events of an answer's blocks."""

    def __init__(self) -> None:
        self.has_call = False
        self._count = 0
        self._last: Part | None = None
        self._delta_before = b""

    def take(self, part: Part) -> bytes:
        """The events of the next part."""
        written = b""
        if begins_segment(part, self._last):
            written = self._stop() + self._start(part)
        self._last = part
        if isinstance(part, CallStart) or not part.text:
            return written
        return written + self._delta_before + event_json(part.text) + b"}}\n\n"

    def end(self) -> bytes:
        """The events of the end; an answer without parts has an empty text."""
        return (b"" if self._count else self.take(Content(""))) + self._stop()

    def _start(self, part: Part) -> bytes:
        block, index = _block_of(part), self._count
        kind, field = _DELTAS[block["type"]]
        self.has_call = self.has_call or isinstance(part, CallStart)
        self._count += 1
        place = b'{"type":"content_block_delta","index":%d,' % index
        delta = f'"delta":{{"type":"{kind}","{field}":'
        self._delta_before = b"event: content_block_delta\ndata: " + place + delta.encode()
        return named_event({"type": "content_block_start", "index": index, "content_block": block})

    def _stop(self) -> bytes:
        if not self._count:
            return b""
        return named_event({"type": "content_block_stop", "index": self._count - 1})


def _block_of(first: Part) -> dict[str, Any]:
    """The block that a part begins, empty."""
    if isinstance(first, CallStart):
        caller = {"type": "direct"}  # The model, and no code that it runs.
        return {"type": "tool_use", "id": first.id, "name": first.name, "input": {}, "caller": caller}
    if isinstance(first, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}  # An answer that cites nothing has no `citations`.


def _blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """The blocks of parts of which none continues another, but a call's arguments."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallArguments):
            blocks[-1]["input"] = _input_of(part.text)
            continue
        blocks.append(_block_of(part))
        if not isinstance(part, CallStart):
            blocks[-1][blocks[-1]["type"]] = part.text
    return blocks


def _input_of(arguments: str) -> dict[str, Any]:
    try:
        values: Any = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _message(answer_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage | {"cache_creation": _NOT_CREATED, "service_tier": "standard"},
    }


def _end(end: End, has_call: bool) -> dict[str, Any]:
    """Why the answer ended; a stop token is not a stop sequence."""
    reason, sequence = "tool_use" if has_call else "end_turn", None
    if end.reason == "length":
        reason = "max_tokens"
    elif isinstance(end.stop, str):
        reason, sequence = "stop_sequence", end.stop
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _usage_of(chunk: TextChunk) -> dict[str, Any]:
    usage = _usage(Usage() if chunk.end is None else chunk.end.usage)
    if chunk.answer is None or chunk.answer.reasoning_tokens is None:
        return usage
    return usage | {"output_tokens_details": {"thinking_tokens": chunk.answer.reasoning_tokens}}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def anthropic_error(error: HeadraceError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    described = {"type": _TYPES.get(error.http_status, kind), "message": error.message}
    return {"type": "error", "error": described, "request_id": current_request_id() or None}


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    """A model by its card in OpenAI's API."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    page = page_of([model_info(card) for card in cards if card["kind"] == "generation"], has_more=False)
    del page["object"]
    return page
