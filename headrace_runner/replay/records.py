"""Where records come from, which can be replayed, and the request that repeats each.

Records come from a running stack's payload log, newest first, or from a file of JSON lines, in its order. Lines are
those of `python -m headrace_logger export --format jsonl`, of `GET /headrace/v1/payloads` or of `headrace log --json`.
Errors: StartupError, one line.

A record can be replayed if it has the prompt's token ids, all sampling parameters with the seed, the weights'
fingerprint, and every token of the answer. An answer that its caller or an error ended early is replayed up to its last
token. A record that cannot be replayed has a reason, in a few words, by which the report counts it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict, ParseError

from headrace.errors import StartupError
from headrace.payload.records import REPLAY_PREFIX, answer_of, is_replay, was_generated
from headrace.sampling import SamplingParameters
from headrace_protos.headrace_pb2 import GenerateRequest, PayloadRecord, QueryPayloadsRequest, TokenIds
from headrace_runner.gateway import Gateway

PAGE = 100
_TIMEOUT_S = 60.0
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")  # Columns of an export.
_NOT_READ = ("logprobs", "inputs", "outputs")  # Large, or with values that protobuf's JSON does not have.

# Without influence on the tokens: a second predictor, a limit of speed, what the cache shares.
_NOT_REPEATED = {"cache_salt", "hedge", "pace", "priority"}
_LAST_PRIORITY = 2**31 - 1  # Other requests of the same client start first.
_SEED_BITS = 2**64 - 1  # The sampler uses these bits of a seed, which may be negative.
_WHOLE_TEXT = 1024 * 1024  # Longer prompts are cut off in records.
_TOKENISING = frozenset(("add_special_tokens", "chat_template_kwargs", "tools"))  # Parameters that `Generate` lacks.

REPLAY = "a replay"
NOT_A_GENERATION = "not a generation"
INCOMPLETE = "incomplete record"
ABORTED = "its transformer was killed"
NO_ANSWER = "answer not on record"
NO_IDS = "token ids redacted or left out"
NO_SAMPLING = "sampling parameters not on record"
NO_PROMPT = "prompt redacted or left out"
NO_FINGERPRINT = "answered by another server's model"
OTHER_SAMPLING = "sampling parameters redacted or of another version"


def of_stack(gateway: Gateway, since: datetime, model: str | None) -> Iterator[PayloadRecord]:
    """The records that arrived from `since` until now; those of the replay itself are later."""
    query = QueryPayloadsRequest(page_size=PAGE, model=model)
    query.since.FromDatetime(since)
    query.until.FromDatetime(datetime.now(UTC))
    while True:
        try:
            # Whole: the logger ends calls of those who read slowly.
            page = list(gateway.log.Query(query, timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            raise StartupError(f"the payload log cannot be read: {error.code().name}: {error.details()}") from None
        yield from page
        if len(page) < PAGE:
            return
        query.page_token = page[-1].page_token


def of_file(path: Path, since: datetime | None, model: str | None) -> Iterator[PayloadRecord]:
    """The records of a file that arrived from `since` on, of one model or of all."""
    for record in _read(path):
        arrived = record.time.ToDatetime(tzinfo=UTC)
        if (since is None or arrived >= since) and model in (None, record.model):
            yield record


def _read(path: Path) -> Iterator[PayloadRecord]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"{path} cannot be read: {reason}") from None


def _parsed(line: str, where: str) -> PayloadRecord:
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise StartupError(f"{where}: not a record, which is a JSON object")
        usage = {name: values[name] for name in _USAGE if values.get(name) is not None}
        record = ParseDict(_plain(values) | ({"usage": usage} if usage else {}), PayloadRecord(), True)
    except (ValueError, ParseError, RecursionError) as error:
        raise StartupError(f"{where}: not a record: {str(error).splitlines()[0][:200]}") from None
    if not record.record_id:
        raise StartupError(f"{where}: not a record: it has no record_id")
    return record


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Without nulls and without what a replay does not read."""
    kept = {name: value for name, value in values.items() if value is not None and name not in _NOT_READ}
    if isinstance(chunks := kept.get("chunks"), list):
        kept["chunks"] = [_plain(chunk) if isinstance(chunk, dict) else chunk for chunk in chunks]
    return kept


@dataclass(frozen=True)
class LoggedStream:
    """A recorded answer, and the request that repeats it.

    `token_ids` are all of the answer's; empty where only its text is known, as in an export without chunks. Of an
    answer that was not `is_whole` the replay must begin with them. `is_paced`: its duration is its caller's choice.
    """

    record: PayloadRecord
    request: GenerateRequest
    token_ids: tuple[int, ...]
    text: str
    is_whole: bool
    is_paced: bool


def select(record: PayloadRecord, from_text: bool = False) -> LoggedStream | str:
    """The stream to replay, or the reason why the record cannot be replayed.

    `from_text`: the request has the prompt's text or messages, where the record has them whole, instead of its ids.
    """
    ids = tuple(token_id for chunk in record.chunks for token_id in chunk.token_ids)
    if reason := _reason(record, ids):
        return reason
    try:
        sampling = SamplingParameters.model_validate_json(record.sampling)
        request = _request(record, sampling, from_text)
    except (ValueError, TypeError, KeyError):  # A value of another type or name.
        return OTHER_SAMPLING
    if sampling.seed is None or sampling.max_tokens is None:
        return OTHER_SAMPLING
    is_whole = record.status == "OK" and bool(record.finish_reason)
    if not is_whole:
        request.max_tokens = len(ids)
        request.min_tokens = min(request.min_tokens, len(ids))
        request.ClearField("stop")  # None of them was in the text so far.
    return LoggedStream(record, request, ids, answer_of(record), is_whole=is_whole, is_paced=sampling.pace > 0)


def _reason(record: PayloadRecord, ids: tuple[int, ...]) -> str:
    """Why the record cannot be replayed; empty if nothing is missing."""
    if is_replay(record.request_id):
        return REPLAY
    if not was_generated(record):
        return NOT_A_GENERATION
    if record.incomplete:
        return INCOMPLETE
    if not record.HasField("ttft_ms"):
        return f"no tokens ({record.status or 'no status'})"
    if record.status == "ABORTED":
        return ABORTED
    return _missing(record, ids)


def _missing(record: PayloadRecord, ids: tuple[int, ...]) -> str:
    """What an answered record lacks; empty if nothing."""
    tokens = record.usage.completion_tokens if record.HasField("usage") else len(ids)
    text_only = not record.chunks and bool(record.text) and record.status == "OK"
    if not record.chunks and not text_only:
        return NO_ANSWER
    if not text_only and (not ids or len(ids) != tokens):
        return NO_IDS
    if not record.sampling:
        return NO_SAMPLING
    if not record.prompt_ids:
        return NO_PROMPT
    return "" if record.fingerprint else NO_FINGERPRINT


def _request(record: PayloadRecord, sampling: SamplingParameters, from_text: bool) -> GenerateRequest:
    """The request with every parameter, so that defaults of the other stack have no effect."""
    values = sampling.model_dump(exclude_none=True, exclude=_NOT_REPEATED)
    values["seed"] = values.get("seed", 0) & _SEED_BITS
    values["top_k"] = max(0, values["top_k"])
    values["bad_token_ids"] = [TokenIds(ids=ids) for ids in sampling.bad_token_ids]
    request = GenerateRequest(
        model=record.served_model or record.model,
        request_id=f"{REPLAY_PREFIX}{record.record_id}",
        stop=_parameters(record).get("stop", ()),
        priority=_LAST_PRIORITY,
        **values,
    )
    if not (from_text and _add_text(request, record)):
        request.prompt_ids.extend(record.prompt_ids)
    return request


def _add_text(request: GenerateRequest, record: PayloadRecord) -> bool:
    """Adds the prompt's text or messages; False if the record does not have them as `Generate` takes them."""
    if len(record.prompt) >= _WHOLE_TEXT or _TOKENISING.intersection(_parameters(record)):
        return False
    if record.prompt_kind == "text":
        request.prompt = record.prompt
        return True
    if record.prompt_kind != "messages":
        return False
    messages = json.loads(record.prompt)
    if any(message.keys() - {"role", "content"} for message in messages):
        return False
    for message in messages:
        request.messages.add(role=message["role"], content=message["content"])
    return True


def _parameters(record: PayloadRecord) -> dict[str, Any]:
    """The parameters that the caller gave; raises ValueError."""
    values = json.loads(record.parameters or "{}")
    if not isinstance(values, dict):
        raise ValueError("the parameters are not an object")
    return values
