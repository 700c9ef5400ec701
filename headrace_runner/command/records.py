"""`headrace log` and `headrace trace`: records of the payload log; `headrace usage`: the usage as a table."""

import json
import re
import urllib.request
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Literal

import grpc
from google.protobuf.json_format import MessageToDict

from headrace.endpoints import DIRECT
from headrace.errors import StartupError
from headrace.rpc.client.caller_key import headers
from headrace_protos import headrace_pb2 as pb
from headrace_runner.gateway import TIMEOUT_S, Gateway
from headrace_runner.terminal import BOLD, GREEN, RED, Painter, one_line, printable, table

MAX_RECORDS = 1000  # The maximum of one page.
_SPAN = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PREVIEW = 60

_KEYS: tuple[Literal["client"], Literal["model"], Literal["day"]] = ("client", "model", "day")
_SUMS = ("requests", "failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_TITLES = {
    "failed_requests": "failed",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
}
_NAME = 40  # Characters of a client or a model.


def since(text: str, now: datetime | None = None) -> datetime:
    """Parses an argument: 90s, 15m, 24h, 7d before now, or a time in ISO 8601."""
    try:
        if span := _SPAN.fullmatch(text):
            return (now or datetime.now(UTC)) - timedelta(**{_UNITS[span[2]]: int(span[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ArgumentTypeError(f"{text!r} is neither 90s, 15m, 24h, 7d nor a time in ISO 8601") from None


def latest(gateway: Gateway, count: int, filters: dict[str, Any]) -> list[pb.PayloadRecord]:
    """The newest records that pass the filters, oldest first."""
    with gateway.errors():
        call = gateway.log.Query(pb.QueryPayloadsRequest(page_size=count, **filters), timeout=TIMEOUT_S)
        return list(call)[::-1]


def follow(gateway: Gateway, count: int, filters: dict[str, Any]) -> Iterator[pb.PayloadRecord]:
    """Yields the newest records, and then each as it is committed, without end."""
    lasting = {name: value for name, value in filters.items() if name != "since"}
    with gateway.errors():
        tail = gateway.log.Tail(pb.TailPayloadsRequest(**lasting))
        try:
            before = latest(gateway, count, filters) if count else []
            yield from before
            known = {record.record_id for record in before}
            yield from (record for record in tail if record.record_id not in known)
        finally:
            tail.cancel()


def one(gateway: Gateway, identifier: str) -> pb.PayloadRecord:
    """The record with this id, or the newest of the request with it; raises StartupError if there is none."""
    with gateway.errors():
        for key in ("record_id", "request_id"):
            try:
                return gateway.log.Get(pb.GetPayloadRequest(**{key: identifier}), timeout=TIMEOUT_S)  # type: ignore[no-any-return]
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
    raise StartupError(f"no record of {identifier!r}; a record is written after its call has ended: `headrace log`")


def of_trace(gateway: Gateway, identifier: str) -> list[pb.PayloadRecord]:
    """The records of a trace, in order; `identifier` is a trace, request or record id, or a traceparent."""
    parent = _TRACE_PARENT.fullmatch(identifier)
    trace_id = parent[1] if parent else identifier
    found = latest(gateway, MAX_RECORDS, {"trace_id": trace_id}) if _TRACE_ID.fullmatch(trace_id) else []
    if found:
        return found
    record = one(gateway, identifier)
    return latest(gateway, MAX_RECORDS, {"trace_id": record.trace_id}) if record.trace_id else [record]


def trace_page(gateway: Gateway) -> str:
    """The address of traces in a browser, without the id; empty if the stack's settings have none."""
    try:
        request = urllib.request.Request(f"http://{gateway.address}/playground/settings.json", headers=headers())
        with DIRECT.open(request, timeout=TIMEOUT_S) as answer:
            page = json.load(answer)["trace_page"]
    except (OSError, ValueError, KeyError):
        return ""
    return page if isinstance(page, str) and page.startswith(("http://", "https://")) else ""


def as_json(message: pb.PayloadRecord | pb.UsageGroup) -> str:
    return json.dumps(MessageToDict(message, preserving_proto_field_name=True))


def as_line(record: pb.PayloadRecord, paint: Painter, width: int | None = None) -> str:
    """One line: time, model, outcome, tokens, times, request, and the beginning of prompt and answer."""
    line = f"{_time(record, '%m-%d %H:%M:%S')} {one_line(record.model or '-', 24):<24} "
    outcome = f"{_outcome(record):<16} "
    rest = f"{_tokens(record):>9} {_milliseconds(record):>18} {one_line(record.request_id, 36):<36} "
    room = _PREVIEW if width is None else max(width - len(line + outcome + rest) - 1, 0)
    preview = _preview(record, room) if room else ""
    colour = GREEN if record.status in ("", "OK") else RED
    return f"{line}{paint(colour, outcome)}{rest}{preview}".rstrip()


def as_text(record: pb.PayloadRecord, paint: Painter) -> str:
    """The whole record, field by field."""
    fields = {
        "record": record.record_id,
        "request": record.request_id,
        "trace": record.trace_id,
        "time": _time(record, "%Y-%m-%d %H:%M:%S.%f"),
        "model": record.model,
        "parameters": record.parameters,
        **hops(record),
        "prompt": record.prompt,
        "answer": record.text,
    }
    return "\n".join(f"{paint(BOLD, f'{name:<12}')} {printable(value)}" for name, value in fields.items() if value)


def hops(record: pb.PayloadRecord) -> dict[str, str]:
    """A summary of each hop's part of a call."""
    found = {}
    if record.HasField("gateway"):
        call = record.gateway
        flags = "" if call.response_flags in ("", "-") else f", {call.response_flags}"
        upstream = f", answered by {call.upstream}" if call.upstream else ""
        found["gateway"] = f"{call.path}: {call.http_status}{flags} after {call.duration_ms:.1f} ms{upstream}"
    if record.protocol:
        found["transformer"] = (
            f"{record.protocol}: {_outcome(record)}, {_tokens(record)} tokens, {_spelled_out(record)}"
        )
    if record.chunks:
        offsets = [chunk.offset_ms for chunk in record.chunks]
        pause = max((after - before for before, after in pairwise(offsets)), default=0.0)
        found["chunks"] = f"{len(offsets)}, the longest pause {pause:.1f} ms"
    if record.resumes:
        how = f", {record.continuity}" if record.continuity else ""
        found["resumed"] = f"{record.resumes} times at another predictor{how}"
    if record.message or record.failed_hop:
        found["error"] = f"{record.failed_hop or 'unknown hop'}: {record.message}"
    return found


def as_trace(records: Iterable[pb.PayloadRecord], page: str, paint: Painter) -> str:
    """The calls of one trace with their hops."""
    records = list(records)
    trace_id = records[0].trace_id
    lines = [f"{paint(BOLD, 'trace')} {trace_id or 'unknown'}"]
    if trace_id:
        lines.append(
            f"{paint(BOLD, 'spans')} {page + trace_id if page else 'GATEWAY_TRACE_PAGE names no page of traces'}"
        )
    for record in records:
        lines += ["", as_text(record, paint)]
    return "\n".join(lines)


def _time(record: pb.PayloadRecord, form: str) -> str:
    return record.time.ToDatetime(tzinfo=UTC).astimezone().strftime(form)


def _outcome(record: pb.PayloadRecord) -> str:
    status = record.status or "-"
    return f"{status} {record.finish_reason}" if record.finish_reason else status


def _tokens(record: pb.PayloadRecord) -> str:
    return f"{record.usage.prompt_tokens}+{record.usage.completion_tokens}"


def _milliseconds(record: pb.PayloadRecord) -> str:
    first = f"{record.ttft_ms:.0f}/" if record.HasField("ttft_ms") else ""
    return f"{first}{record.duration_ms:.0f} ms"


def _spelled_out(record: pb.PayloadRecord) -> str:
    first = f"the first after {record.ttft_ms:.0f} ms, " if record.HasField("ttft_ms") else ""
    engine = f", {record.engine_ms:.0f} ms of engine" if record.HasField("engine_ms") else ""
    return f"{first}{record.duration_ms:.0f} ms in all{engine}"


def _preview(record: pb.PayloadRecord, width: int) -> str:
    """The beginning of prompt and answer; for a conversation, of its last message."""
    prompt = record.prompt
    with suppress(ValueError, LookupError, TypeError):
        prompt = str(json.loads(prompt)[-1]["content"])
    if not record.text:
        return one_line(prompt, width)
    question = one_line(prompt, width // 2)
    return one_line(f"{question} → {record.text}", width)


def usage(gateway: Gateway, query: dict[str, Any]) -> pb.UsageResponse:
    """Usage as the fields of UsageRequest ask; raises StartupError."""
    with gateway.errors():
        return gateway.log.Usage(pb.UsageRequest(**query), timeout=TIMEOUT_S)  # type: ignore[no-any-return]


def usage_table(response: pb.UsageResponse, paint: Painter) -> str:
    """A line for each group under a line of titles; names to the left, numbers to the right."""
    groups = response.groups
    if not groups:
        return "no requests"
    keys = [key for key in _KEYS if groups[0].HasField(key)]
    titles = [*keys, *(_TITLES.get(name, name) for name in _SUMS), "seconds"]
    rows = [_cells(group, keys) for group in groups]
    first, *lines = table(titles, rows, keys)
    return "\n".join([paint(BOLD, first), *lines])


def _cells(group: pb.UsageGroup, keys: Sequence[str]) -> list[str]:
    names = [one_line(getattr(group, key), _NAME) or "-" for key in keys]
    return [*names, *(f"{getattr(group, name):,}" for name in _SUMS), f"{group.seconds:,.1f}"]
