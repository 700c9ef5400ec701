"""A payload record as plain values: the common names and types of the JSON and Parquet exports.

Times are datetimes in UTC with whole microseconds; unknown values are None; a tensor's contents are bytes; floats may
be NaN or infinite. `to_json` encodes them as JSON: times as RFC 3339, contents in base64, NaN and infinities as null.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from headrace_protos.headrace_pb2 import GatewayCall, PayloadChunk, PayloadRecord, PayloadTensor

_TEXTS = ("request_id", "model", "protocol", "prompt", "text", "finish_reason", "status", "message", "failed_hop")
_GATEWAY = tuple(field.name for field in GatewayCall.DESCRIPTOR.fields)


def row(record: PayloadRecord) -> dict[str, Any]:
    """Every field of the record by name; the usage has columns of its own."""
    usage = record.usage if record.HasField("usage") else None
    gateway = record.gateway if record.HasField("gateway") else None
    return {
        "record_id": record.record_id,
        "time": time_of(record),
        **{name: getattr(record, name) for name in _TEXTS},
        "parameters": record.parameters,
        "chunks": [_chunk(chunk) for chunk in record.chunks],
        "prompt_tokens": usage and usage.prompt_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "ttft_ms": record.ttft_ms if record.HasField("ttft_ms") else None,
        "duration_ms": record.duration_ms,
        "engine_ms": record.engine_ms if record.HasField("engine_ms") else None,
        "trace_id": record.trace_id,
        "span_id": record.span_id,
        "metadata": dict(record.metadata),
        "inputs": _tensors(record.inputs),
        "outputs": _tensors(record.outputs),
        "resumes": record.resumes,
        "predictors": [{"predictor": part.predictor, "offset_ms": part.offset_ms} for part in record.predictors],
        "client": record.client,
        "incomplete": record.incomplete,
        "call_id": record.call_id,
        "fingerprint": record.fingerprint,
        "served_model": record.served_model,
        "prompt_ids": list(record.prompt_ids),
        "sampling": record.sampling,
        "prompt_kind": record.prompt_kind,
        "gateway": gateway and {name: getattr(gateway, name) for name in _GATEWAY},
    }


def time_of(record: PayloadRecord) -> datetime | None:
    """The time of the request's arrival; None if it is outside of datetime's range."""
    try:
        return record.time.ToDatetime(tzinfo=UTC)
    except (OverflowError, ValueError):
        return None


def to_json(values: Any) -> bytes:
    """Encodes the values as one line of JSON, without the line break."""
    return orjson.dumps(values, default=_base64, option=orjson.OPT_UTC_Z)


def _chunk(chunk: PayloadChunk) -> dict[str, Any]:
    return {
        "offset_ms": chunk.offset_ms,
        "text": chunk.text,
        "token_ids": list(chunk.token_ids),
        "logprobs": list(chunk.logprobs),
        "outputs": _tensors(chunk.outputs),
    }


def _tensors(tensors: Iterable[PayloadTensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "digest": tensor.digest,
            "size": tensor.size if tensor.HasField("size") else None,
            "data": tensor.data if tensor.HasField("data") else None,
        }
        for tensor in tensors
    ]


def _base64(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON")
