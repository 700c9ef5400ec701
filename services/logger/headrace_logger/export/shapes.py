"""Writes records as JSON lines, in one of several shapes.

A shape makes one line of a record, or gives the reason why the record has none: a few words, by which the export counts
the records that it leaves out.

- `jsonl`: every field, see values.py.
- `chat`: an example for fine-tuning and evaluation, in the shape of OpenAI's fine-tuning files, `{"messages": [{"role",
  "content"}, …]}` with the answer as the last message (platform.openai.com/docs/guides/supervised-fine-tuning). A text
  prompt is `{"prompt", "completion"}`, the shape of OpenAI's completion models, which TRL reads too
  (huggingface.co/docs/trl/dataset_formats). Only whole answers that ended by themselves are examples: not those that
  redaction has changed, and not those that end at `max_tokens`, which would teach a model to stop anywhere. Nor are
  chats with tools, whose answers are on record in the model's own format.
- `mooncake`: a trace of arrivals in the format of Mooncake's published traces (github.com/kvcache-ai/Mooncake,
  FAST25-release/traces), without contents: see Trace.
- `guidellm`: a row of a dataset with the default names of guidellm 0.8's column mapper
  (guidellm/data/preprocessors/mappers.py). `output_tokens_count` is the number of tokens that guidellm requests. Every
  row has both forms of the prompt, because the reader takes the columns' types from the first rows: a text is one
  message of the user, as guidellm itself would send it, and of a chat `prompt` is the contents of its messages, a line
  each.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import IO, Any

from headrace.payload.records import answer_of, is_replay, token_count, was_generated
from headrace_logger.values import row, to_json
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

Shape = Callable[[PayloadRecord], dict[str, Any] | str]

BLOCK_TOKENS = 512
_DIGEST_BYTES = 16


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


def write_lines(file: IO[bytes], shape: Shape, batches: Iterable[Sequence[PayloadRecord]]) -> tuple[int, Counter[str]]:
    """Writes one JSON object in each line; returns their number, and by reason that of the records without one."""
    count, left_out = 0, Counter[str]()
    for records in batches:
        shaped = [shape(record) for record in records]
        lines = [to_json(values) + b"\n" for values in shaped if not isinstance(values, str)]
        left_out.update(reason for reason in shaped if isinstance(reason, str))
        file.writelines(lines)
        count += len(lines)
    file.flush()
    return count, left_out


def example(record: PayloadRecord) -> dict[str, Any] | str:
    """The example, or the reason why the record is none."""
    if reason := answered_whole(record):
        return reason
    if has_tools(record):
        return TOOLS
    answer = answer_of(record)
    if (messages := messages_of(record)) is None:
        return {"prompt": record.prompt, "completion": answer}
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def dataset_row(record: PayloadRecord) -> dict[str, Any] | str:
    """The row, or the reason why the record is none."""
    if reason := sent_text(record):
        return reason
    messages = messages_of(record)
    return {
        "prompt": record.prompt if messages is None else "\n".join(message["content"] for message in messages),
        "messages": [{"role": "user", "content": record.prompt}] if messages is None else messages,
        "prompt_tokens_count": len(record.prompt_ids),
        "output_tokens_count": output_tokens(record),
    }


class Trace:
    """The lines of one trace; records come in the order of their times.

    A line has `timestamp` (milliseconds since the first request), `input_length` and `output_length` (tokens), and
    `hash_ids`, one for each block of 512 tokens of the prompt, the last one shorter. An id stands for a block and all
    blocks before it, so that requests share ids exactly as far as their prompts are equal. Ids are whole numbers in the
    order of appearance: they contain nothing of the text. Models have ids of their own, because token ids mean
    different texts to them. Memory: about 150 bytes for each distinct block.
    """

    def __init__(self) -> None:
        self._first_ns: int | None = None
        self._ids: dict[bytes, int] = {}

    def line(self, record: PayloadRecord) -> dict[str, Any] | str:
        """The line, or the reason why the record has none."""
        if reason := sent_load(record):
            return reason
        time_ns = record.time.seconds * 1_000_000_000 + record.time.nanos
        if self._first_ns is None:
            self._first_ns = time_ns
        return {
            "timestamp": (time_ns - self._first_ns) // 1_000_000,
            "input_length": len(record.prompt_ids),
            "output_length": output_tokens(record),
            "hash_ids": self._hash_ids(record.served_model or record.model, record.prompt_ids),
        }

    def _hash_ids(self, model: str, token_ids: Sequence[int]) -> list[int]:
        tokens = array("I", token_ids)
        digest = _digest(b"", model.encode())
        hash_ids = []
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            digest = _digest(digest, tokens[begin : begin + BLOCK_TOKENS].tobytes())
            hash_ids.append(self._ids.setdefault(digest, len(self._ids)))
        return hash_ids


def _digest(before: bytes, contents: bytes) -> bytes:
    return blake2b(before + contents, digest_size=_DIGEST_BYTES).digest()


# Name of a format → its shape for one file.
SHAPES: dict[str, Callable[[], Shape]] = {
    "jsonl": lambda: row,
    "chat": lambda: example,
    "mooncake": lambda: Trace().line,
    "guidellm": lambda: dataset_row,
}
