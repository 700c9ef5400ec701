"""Responses that are on record: what `previous_response_id` continues, and what a GET returns.

The payload log keeps them, for as long as it keeps records. A response's id has the id of its request, by which the log
finds the record, a random part, which the record's parameters repeat, and a signature: only an id that its client has
from this stack costs a look at the log. The texts are those of the record: redacted where a rule redacts them.
"""

import asyncio
import base64
import binascii
import json
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_protos.headrace_pb2 import DeletePayloadsRequest, PayloadRecord, QueryPayloadsRequest
from headrace_transformer.frontends.http import limit_of, newest_first, page_of
from headrace_transformer.frontends.openai.answers import message_of
from headrace_transformer.frontends.openai.errors import NoSuchObjectError
from headrace_transformer.frontends.openai.tools import (
    TemplateMessage,
    ToolCall,
    json_text,
    read_tools,
    template_message,
)
from headrace_transformer.frontends.responses.answers import ended, head_of, status_of
from headrace_transformer.frontends.responses.items import ItemFields, output_of
from headrace_transformer.frontends.responses.tools import Origin, flat_tool
from headrace_transformer.generation.recording import MAX_RECORDED_CHARACTERS
from headrace_transformer.generation.resume_ids import SIGNATURE_BYTES, Signer
from headrace_transformer.text.answer_parts import CallArguments, CallStart, Content, Part, Reasoning
from headrace_transformer.text.tools import ToolUse

RESPONSE_ID = "response_id"
HAS_INSTRUCTIONS = "instructions"
CALL_SEED = "call_seed"  # Of the ids of calls.
ORIGINS = "tool_origins"  # Of functions that stand for other tools.
_PREFIX = "resp_"
_RANDOM_BYTES = 8
_TOKEN = struct.Struct(f"{_RANDOM_BYTES}s{SIGNATURE_BYTES}s")
_SIGNED = b"response id"
_TIMEOUT_S = 5.0
_MAX_RECORDS = 16  # With the same request id.
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)  # A record is in the log some time after the answer's end.
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def new_response_id(call: CallContext, signer: Signer) -> str:
    """An id for the response to a request."""
    drawn = secrets.token_bytes(_RANDOM_BYTES)
    signature = signer.sign(_SIGNED, _signed(drawn, call.request_id, call))
    ending = base64.urlsafe_b64encode(call.request_id.encode()).rstrip(b"=").decode()
    return f"{_PREFIX}{(drawn + signature).hex()}{ending}"


class StoredResponses:
    """Reads `log`, a PayloadLogStub."""

    def __init__(self, log: Any, signer: Signer) -> None:
        self._log = log
        self._signer = signer

    async def find(self, wanted: str, call: CallContext, param: str = "") -> PayloadRecord:
        """The record of a response, once the log has it.

        Raises NoSuchObjectError if it has none, or for a response that a request's field `param` names
        InvalidRequestError.
        """
        request_id = _request_id(wanted, call, self._signer)
        for pause_s in (*_PAUSES_S, 0.0):
            if request_id is not None and (found := await self._query(wanted, request_id, call)) is not None:
                return found
            if request_id is None or not pause_s or (call.deadline.left() or pause_s) < pause_s:
                break
            await asyncio.sleep(pause_s)
        message = f"there is no response {wanted[:96]!r} on record"
        raise InvalidRequestError(message, param=param) if param else NoSuchObjectError(message)

    async def delete(self, record: PayloadRecord, call: CallContext) -> None:
        """Deletes a record."""
        timeout_s = min(_TIMEOUT_S, call.deadline.left() or _TIMEOUT_S)
        await self._log.Delete(DeletePayloadsRequest(record_id=record.record_id), timeout=timeout_s)

    async def _query(self, wanted: str, request_id: str, call: CallContext) -> PayloadRecord | None:
        client = call.client.name or None
        query = QueryPayloadsRequest(request_id=request_id, client=client, status="OK", page_size=_MAX_RECORDS)
        deadline = Deadline.after(min(_TIMEOUT_S, call.deadline.left() or _TIMEOUT_S))
        record: PayloadRecord
        async for record in self._log.Query(query, timeout=deadline.left()):
            if parameters_of(record).get(RESPONSE_ID) == wanted:
                return record
        return None


def parameters_of(record: PayloadRecord) -> dict[str, Any]:
    """The parameters on record; none where they are redacted."""
    try:
        parameters = json.loads(record.parameters or "{}")
    except ValueError:
        return {}
    return parameters if isinstance(parameters, dict) else {}


def conversation_of(record: PayloadRecord, parts: Sequence[Part]) -> list[TemplateMessage]:
    """The messages before a response, without its instructions, and its own of `parts`; raises InvalidRequestError."""
    return [*messages_before(record), _answer_of(parts)]


def messages_before(record: PayloadRecord) -> list[TemplateMessage]:
    """The messages before a response, without its instructions; raises InvalidRequestError."""
    try:
        messages = [_message_of(message) for message in json.loads(record.prompt)]
    except (ValueError, TypeError, KeyError):
        messages = []
    if not messages or len(record.prompt) >= MAX_RECORDED_CHARACTERS:
        raise InvalidRequestError("the response's messages are not on record", param="previous_response_id")
    begins = 1 if parameters_of(record).get(HAS_INSTRUCTIONS) else 0
    return messages[begins:]


def stored_response(wanted: str, record: PayloadRecord, parts: Sequence[Part]) -> dict[str, Any]:
    """A response as its record has it; the tokens of its reasoning are not counted."""
    parameters, tools = parameters_of(record), tools_of(record)
    fields = fields_of(record)
    head = head_of(wanted, record.time.seconds, record.model)
    if tools is not None:
        flat = [flat_tool(function.definition, fields.origins) for function in tools.functions]
        choice = parameters.get("tool_choice", "auto")
        head |= {"tools": flat, "tool_choice": choice, "parallel_tool_calls": tools.is_parallel}
    status = status_of(record.finish_reason)
    usage = record.usage if record.HasField("usage") else None
    return head | ended(status, output_of(wanted, parts, status, fields), usage, None)


def fields_of(record: PayloadRecord) -> ItemFields:
    """What the items of a response on record have."""
    return ItemFields({name: Origin(*given) for name, given in parameters_of(record).get(ORIGINS, {}).items()})


def tools_of(record: PayloadRecord) -> ToolUse | None:
    """The functions of a request on record; None where there are none, or where they are redacted."""
    parameters = parameters_of(record)
    try:
        functions = read_tools(parameters.get("tools") or [])
    except ValueError:
        return None
    return ToolUse(functions, is_parallel=parameters.get("parallel_tool_calls") is not False) if functions else None


def _message_of(message: dict[str, Any]) -> TemplateMessage:
    pair = message["role"], message["content"]
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    return (*pair, json.dumps(fields)) if fields else pair


def _answer_of(parts: Sequence[Part]) -> TemplateMessage:
    """The assistant's message that an answer makes."""
    message = message_of(parts)
    calls = [ToolCall.model_validate(call) for call in message.get("tool_calls", ())]
    return template_message("assistant", message["content"] or "", calls, message.get("reasoning"))


def _request_id(wanted: str, call: CallContext, signer: Signer) -> str | None:
    """The id of the request that a response answered, None if its client has no such id from this stack."""
    token = wanted.removeprefix(_PREFIX)
    encoded = token[2 * _TOKEN.size :]
    try:
        drawn, signature = _TOKEN.unpack(bytes.fromhex(token[: 2 * _TOKEN.size]))
        request_id = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (binascii.Error, struct.error, ValueError):
        return None
    is_ours = signer.verifies(_SIGNED, _signed(drawn, request_id, call), signature)
    return request_id if wanted.startswith(_PREFIX) and is_ours else None


def _signed(drawn: bytes, request_id: str, call: CallContext) -> bytes:
    return drawn + json.dumps([call.client.name, request_id]).encode()


def input_items(response_id: str, messages: Iterable[TemplateMessage], fields: ItemFields) -> list[dict[str, Any]]:
    """The items that the messages of a chat are made of, oldest first."""
    items: list[dict[str, Any]] = []
    for number, (role, content, *further) in enumerate(messages):
        extra: dict[str, Any] = json.loads(further[0]) if further else {}
        own = f"in{number}_{response_id.removeprefix('resp_')}"
        if role == "assistant":
            items += output_of(own, _parts_of(content, extra), "completed", fields)
        elif role == "tool":
            output = {"id": f"fco_{own}", "type": "function_call_output", "status": "completed", "output": content}
            items.append(output | {"call_id": extra.get("tool_call_id", "")})
        else:
            text = {"type": "input_text", "text": content}
            item = {"id": f"msg_{own}", "type": "message", "status": "completed", "role": role}
            items.append(item | {"content": [text]})
    return items


def page_of_items(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A part of a list: as many items as a query wants, behind the one with the id `after`."""
    ordered = list(reversed(items) if newest_first(query) else items)
    limit, after = limit_of(query, _DEFAULT_LIMIT, _MAX_LIMIT), query.get("after", "")
    begins = next((place for place, item in enumerate(ordered, start=1) if item["id"] == after), None)
    if after and begins is None:
        raise InvalidRequestError(f"there is no item {after[:64]!r}", param="after")
    rest = ordered[begins or 0 :]
    return page_of(rest[:limit], has_more=len(rest) > limit)


def _parts_of(content: str, extra: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of an answer that make a message of the assistant."""
    if reasoning := extra.get("reasoning_content"):
        yield Reasoning(reasoning)
    calls = extra.get("tool_calls", ())
    if content or not calls:
        yield Content(content)
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = function["arguments"]
        yield CallStart(number, call["id"], function["name"])
        yield CallArguments(number, arguments if isinstance(arguments, str) else json_text(arguments))
