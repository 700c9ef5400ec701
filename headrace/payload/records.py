"""What a payload record says of its request, for all who read records; pure."""

from __future__ import annotations

from headrace_protos.headrace_pb2 import PayloadRecord


def token_count(record: PayloadRecord) -> int:
    """The number of the answer's tokens on record."""
    return sum(len(chunk.token_ids) for chunk in record.chunks)


def was_generated(record: PayloadRecord) -> bool:
    """Whether an engine was asked to generate text for it: not so for tensors, and what was refused before."""
    return bool(record.sampling or token_count(record)) or record.HasField("engine_ms")


def answer_of(record: PayloadRecord) -> str:
    """The answer's text."""
    return record.text or "".join(chunk.text for chunk in record.chunks)
