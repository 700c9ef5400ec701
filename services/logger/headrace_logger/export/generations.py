"""Which records are generations that an export can use, and why others are not; pure.

A reason is a few words, by which the export counts the records that it leaves out. Empty: the record can be used.
"""

from __future__ import annotations

import json

from headrace.payload.records import answer_of, is_replay, token_count, was_generated
from headrace_protos.headrace_pb2 import PayloadRecord

_OF_CALLS = {"tool_calls", "tool_call_id"}
WHOLE_TEXT = 1024 * 1024  # Characters; the transformer cuts off longer prompts, and says so in the prompt itself.

REPLAY = "replays of other records"
NOT_A_GENERATION = "not generations"
INCOMPLETE = "incomplete records"
NO_PROMPT = "prompt redacted or not on record"
NO_ANSWER = "answer redacted or not on record"
CUT_PROMPT = "prompt too long for a record"
NO_TEXT = "prompts of token ids, without text"
NO_TOKENS = "no tokens"
TOOLS = "chats with tools"
AT_MAX_TOKENS = "answer cut off at its maximum of tokens"


def answered_whole(record: PayloadRecord) -> str:
    """Why the record is not a prompt with a whole, regular answer, both as they were."""
    if reason := _no_generation(record):
        return reason
    if record.status != "OK":
        return f"status {record.status or 'unknown'}"
    if record.finish_reason == "length":
        return AT_MAX_TOKENS
    if not answer_of(record) or token_count(record) != record.usage.completion_tokens:
        return NO_ANSWER
    return _no_text(record)


def sent_load(record: PayloadRecord) -> str:
    """Why the record is not a client's request with its prompt's token ids and at least one token of an answer."""
    if reason := _no_generation(record):
        return reason
    if not record.prompt_ids:
        return NO_PROMPT
    return "" if output_tokens(record) else NO_TOKENS


def sent_text(record: PayloadRecord) -> str:
    """As `sent_load`, with the prompt's text too."""
    return sent_load(record) or _no_text(record)


def output_tokens(record: PayloadRecord) -> int:
    """The number of tokens that the answer had at its end, however it ended."""
    return record.usage.completion_tokens if record.HasField("usage") else token_count(record)


def messages_of(record: PayloadRecord) -> list[dict[str, str]] | None:
    """The messages of a chat; None of a prompt that is a text."""
    if record.prompt_kind == "text":
        return None
    return [{"role": message["role"], "content": message["content"]} for message in json.loads(record.prompt)]


def has_tools(record: PayloadRecord) -> bool:
    """Whether a usable record is a chat with tools, or with calls in its messages."""
    if record.prompt_kind != "messages":
        return False
    try:
        parameters = json.loads(record.parameters or "{}")
    except ValueError:  # Cut off.
        return True
    return "tools" in parameters or any(message.keys() & _OF_CALLS for message in json.loads(record.prompt))


def _no_generation(record: PayloadRecord) -> str:
    if is_replay(record.request_id):
        return REPLAY
    if not was_generated(record):
        return NOT_A_GENERATION
    return INCOMPLETE if record.incomplete else ""


def _no_text(record: PayloadRecord) -> str:
    # A record whose prompt a rule has changed has no ids.
    if not (record.prompt and record.prompt_ids):
        return NO_PROMPT
    if record.prompt_kind not in ("text", "messages"):
        return NO_TEXT
    try:
        messages = messages_of(record)
        length = len(record.prompt) if messages is None else sum(len(message["content"]) for message in messages)
    except (ValueError, TypeError, KeyError):
        return NO_PROMPT
    return CUT_PROMPT if length > WHOLE_TEXT else ""
