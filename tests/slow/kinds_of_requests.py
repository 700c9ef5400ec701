"""Requests of every kind, and a client that continues or repeats them until it has the whole answer."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.support.events import Event, read_events
from tests.system.calls import channel

Body = dict[str, Any]

ANSWER_S = 60  # A client that has no whole answer by then has lost it.
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
# With which a call ends whose process died, or that nobody can serve yet.
COME_AGAIN = (429, 500, 502, 503, 504)
COME_AGAIN_GRPC = ("UNAVAILABLE", "CANCELLED", "INTERNAL", "RESOURCE_EXHAUSTED")
# These differ between two equal answers: fields, and the beginnings of ids.
OWN = {"created", "created_at", "completed_at", "usage", "sequence_number"}
OWN_IDS = ("resp_", "msg_", "fc_")

COLOURS = {"type": "string", "enum": ["red", "green", "blue"]}
SCHEMA: Body = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "colour": COLOURS, "age": {"enum": [3, 30]}},
    "required": ["name", "colour", "age"],
    "additionalProperties": False,
}
FUNCTION: Body = {"name": "paint", "parameters": SCHEMA}
SAMPLED = {"temperature": 0.9, "seed": 7}
TELLER: Body = {"model": "teller", **SAMPLED}
LONG: Body = {"max_tokens": 60, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
CALLS: Body = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 200}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
STREAM = {"stream": True}
DATE = {"model": "normalizer", "prompt": "number to words: 918273", "temperature": 0}
RESPONSE = {**TELLER, "input": "Tell me about a boat.", "max_output_tokens": 50, "ignore_eos": True}
RESPONSE_CALLS = {
    **TELLER,
    "input": "Paint it.",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
    "max_output_tokens": 200,
}
MESSAGE_TOOL = {"name": "paint", "input_schema": SCHEMA}
MESSAGE_CALLS = {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}

COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
# Kind → path and body. A stream of the first two paths with one choice is continued, others are repeated.
KINDS: dict[str, tuple[str, Body]] = {
    "completion": (COMPLETIONS, {**TELLER, **LONG, **STREAM, "prompt": "Once upon a time"}),
    "greedy, whole": (COMPLETIONS, {"model": "teller", "temperature": 0, **LONG, "prompt": "The old boat"}),
    "chat": (CHATS, {**TELLER, **LONG, **STREAM, **CHAT}),
    "LoRA": (CHATS, {**TELLER, **LONG, **STREAM, **CHAT, "model": "poet"}),
    "LoRA, whole": (COMPLETIONS, {**TELLER, **LONG, "model": "poet", "prompt": "Once"}),
    "schema": (CHATS, {**TELLER, **STREAM, **CHAT, "response_format": FORM, "max_tokens": 200}),
    "tools": (CHATS, {**TELLER, **STREAM, **CHAT, **CALLS}),
    "tools, whole": (CHATS, {**TELLER, **CHAT, **CALLS}),
    "hedged": (COMPLETIONS, {**TELLER, **LONG, **STREAM, "prompt": "In the garden", "hedge": 2}),
    "n = 4": (CHATS, {**TELLER, **LONG, **CHAT, "n": 4}),
    "n = 4, stream": (COMPLETIONS, {**TELLER, **LONG, **STREAM, "prompt": "A mill", "n": 4}),
    "T5": (COMPLETIONS, DATE | STREAM),
    "T5, whole": (COMPLETIONS, DATE),
    "Responses": (RESPONSES, RESPONSE | STREAM),
    "Responses, whole": (RESPONSES, RESPONSE),
    "Responses, tools": (RESPONSES, RESPONSE_CALLS | STREAM),
    "Messages": (MESSAGES, {**TELLER, **LONG, **STREAM, **CHAT}),
    "Messages, whole": (MESSAGES, {**TELLER, **LONG, **CHAT}),
    "Messages, tools": (MESSAGES, {**TELLER, **STREAM, **CHAT, **MESSAGE_CALLS}),
    "Generate": ("", {**TELLER, **LONG, "prompt": "Tom had a red kite"}),
    "Generate, hedged": ("", {**TELLER, **LONG, "prompt": "One morning a fox", "hedge": 2}),
    "Generate, LoRA": ("", {**TELLER, **LONG, "model": "poet", "prompt": "One morning"}),
}


class ComeAgainError(Exception):
    """The answer broke off; the client may continue or repeat it."""


@dataclass
class Reader:
    """One client's answer, over as many requests as it takes."""

    gateway: str
    http: httpx2.AsyncClient
    kind: str  # One of KINDS, or the name of `request`.
    request: tuple[str, Body] | None = None
    came_again: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    latest: float = 0.0

    async def answer(self) -> Any:
        """The whole answer, without what two equal answers differ in. TimeoutError: lost."""
        path, body = self.request or KINDS[self.kind]
        self.latest, wait_s = time.monotonic(), FIRST_RETRY_S
        read: Callable[..., Any] = (
            self._events if path and body.get("stream") else self._whole if path else self._generate
        )
        state: list[Any] = []  # What earlier requests have brought.
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    return await read(path, body, state)
                except (ComeAgainError, httpx2.HTTPError) as error:
                    self.came_again[f"{self.kind}: {str(error) or type(error).__name__}"[:140]] += 1
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1))
                    wait_s = min(2 * wait_s, LAST_RETRY_S)

    def _moved(self) -> None:
        now = time.monotonic()
        self.longest_pause_s, self.latest = max(self.longest_pause_s, now - self.latest), now

    async def _post(self, path: str, body: Body, **headers: str) -> AsyncIterator[bytes]:
        """Pieces of the answer. Each kind has one key: all its answers have the same ids."""
        headers |= {"content-type": "application/json", "idempotency-key": self.kind}
        async with self.http.stream("POST", path, content=json.dumps(body), headers=headers) as response:
            if response.status_code in COME_AGAIN:
                raise ComeAgainError(f"{response.status_code} {(await response.aread()).decode()}")
            if response.status_code != 200:
                raise ValueError(f"{self.kind}: {response.status_code} {(await response.aread()).decode()}")
            async for piece in response.aiter_raw():
                self._moved()
                yield piece

    async def _whole(self, path: str, body: Body, _: object) -> Any:
        return without_own(json.loads(b"".join([piece async for piece in self._post(path, body)])))

    async def _events(self, path: str, body: Body, state: list[Event]) -> Any:
        is_continued = path in (COMPLETIONS, CHATS) and "n" not in body
        came, before = b"", state[-1].id if state else ""
        headers = {"accept": "text/event-stream"} | ({"last-event-id": before} if before else {})
        try:
            async for piece in self._post(path, body, **headers):
                came += piece
        finally:
            events = read_events(came)
            errors = [event.data for event in events if is_error(event.data)]
            if is_continued:
                state += [event for event in events if event.data not in errors]
        if errors:
            raise ComeAgainError(errors[0])
        return whole_stream(state if is_continued else events)

    async def _generate(self, _: object, body: Body, state: list[Any]) -> Any:
        request = headrace_pb2.GenerateRequest(**body, resume_from=state[-1].resume_id if state else "")
        try:
            async with channel(self.gateway) as opened:
                stub = headrace_pb2_grpc.TextGenerationStub(opened)
                async for response in stub.Generate(request, metadata=(("idempotency-key", self.kind),)):
                    self._moved()
                    state.append(response)
        except grpc.aio.AioRpcError as error:
            if error.code().name not in COME_AGAIN_GRPC:
                raise
            raise ComeAgainError(f"{error.code().name} {error.details()}") from None
        ids = [token_id for response in state for token_id in response.token_ids]
        return ids, "".join(response.text for response in state), state[-1].finish_reason


def without_own(value: Any) -> Any:
    """The value without what differs between two equal answers."""
    if isinstance(value, dict):
        return {
            name: without_own(each)
            for name, each in value.items()
            if name not in OWN and not (name.endswith("id") and str(each).startswith(OWN_IDS))
        }
    return [without_own(each) for each in value] if isinstance(value, list) else value


def is_error(data: str) -> bool:
    return data != "[DONE]" and ("error" in (event := json.loads(data)) or event.get("type") == "response.failed")


def whole_stream(events: Sequence[Event]) -> Any:
    """The answer of a stream, however its text is cut into events. ComeAgainError if its end is missing."""
    texts: dict[Any, str] = {}
    others: list[Any] = []
    heads: set[tuple[str, int]] = set()
    last: Body = {}

    def add(place: Any, text: str | None) -> None:
        texts[place] = texts.get(place, "") + (text or "")

    for event in events:
        if event.data == "[DONE]":
            last = {"type": "message_stop"}
            continue
        last = json.loads(event.data)
        if "choices" in last:
            heads.add((last["id"], last["created"]))
            for choice in last["choices"]:
                delta, number = choice.get("delta", {}), choice["index"]
                add(number, choice.get("text", delta.get("content")))
                for call in delta.get("tool_calls") or ():
                    add((number, call["index"]), call["function"].get("arguments"))
                    others += [(call["id"], call["function"]["name"])] if call.get("id") else []
                others += [(number, choice["finish_reason"])] if choice["finish_reason"] else []
        elif last["type"].endswith("delta") and last["type"] != "message_delta":
            delta = last["delta"]
            add(last["type"], delta if isinstance(delta, str) else delta.get("text") or delta.get("partial_json"))
        elif last["type"] != "ping":
            others.append(without_own(last))
    if last.get("type") not in ("message_stop", "response.completed", "response.incomplete"):
        raise ComeAgainError("the stream ended early")
    assert len(heads) <= 1, heads
    return texts, sorted(others, key=str), [id for id, _ in heads]
