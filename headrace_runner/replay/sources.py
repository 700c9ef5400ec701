"""Where records come from: a running stack's payload log, newest first, or a file of JSON lines, in its order.

Lines are those of `python -m headrace_logger export --format jsonl`, of `GET /headrace/v1/payloads` or of `headrace log
--json`. Errors: StartupError, one line.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict, ParseError

from headrace.errors import StartupError
from headrace.rpc.client.caller_key import headers
from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest
from headrace_protos.headrace_pb2_grpc import PayloadLogStub

PAGE = 100
_TIMEOUT_S = 60.0
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")  # Columns of an export.
_NOT_READ = ("logprobs", "inputs", "outputs")  # Large, or with values that protobuf's JSON does not have.


async def of_stack(
    channel: grpc.aio.Channel, since: datetime, model: str | None
) -> AsyncGenerator[PayloadRecord, None]:
    """The records that arrived from `since` until now; those of the replay itself are later."""
    query = QueryPayloadsRequest(page_size=PAGE, model=model)
    query.since.FromDatetime(since)
    query.until.FromDatetime(datetime.now(UTC))
    stub = PayloadLogStub(channel)
    while True:
        try:
            call = stub.Query(query, timeout=_TIMEOUT_S, metadata=tuple(headers().items()))
            # Whole: the logger ends calls of those who read slowly.
            page = [record async for record in call]
        except grpc.aio.AioRpcError as error:
            raise StartupError(f"the payload log cannot be read: {error.code().name}: {error.details()}") from None
        for record in page:
            yield record
        if len(page) < PAGE:
            return
        query.page_token = page[-1].page_token


async def of_file(path: Path, since: datetime | None, model: str | None) -> AsyncGenerator[PayloadRecord, None]:
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
