"""ModelStatistics of several replicas as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from headrace_protos import inference_pb2 as pb

# Points in time and names, of which the latest is kept; every other number is a count or a duration.
_LATEST = {"last_inference", "batch_size"}


def summed(answers: Iterable[pb.ModelStatisticsResponse]) -> pb.ModelStatisticsResponse:
    """The counts of each model and version, added up."""
    totals: dict[tuple[str, str], pb.ModelStatistics] = {}
    for answer in answers:
        for statistics in answer.model_stats:
            total = totals.setdefault((statistics.name, statistics.version), pb.ModelStatistics())
            _add(total, statistics)
    return pb.ModelStatisticsResponse(model_stats=totals.values())


def _add(total: Message, one: Message) -> None:
    for field, value in one.ListFields():
        if field.name == "batch_stats":
            _add_batches(getattr(total, field.name), value)
        elif field.name == "memory_usage":
            getattr(total, field.name).extend(value)
        elif field.name == "response_stats":
            for key in value:
                _add(getattr(total, field.name)[key], value[key])
        elif isinstance(value, Message):
            # Present though it may be empty.
            getattr(total, field.name).SetInParent()
            _add(getattr(total, field.name), value)
        elif isinstance(value, int):
            own = getattr(total, field.name)
            setattr(total, field.name, max(own, value) if field.name in _LATEST else own + value)
        else:
            setattr(total, field.name, value)


def _add_batches(totals: Any, batches: Iterable[pb.InferBatchStatistics]) -> None:
    for batch in batches:
        total = next((known for known in totals if known.batch_size == batch.batch_size), None)
        _add(totals.add() if total is None else total, batch)
