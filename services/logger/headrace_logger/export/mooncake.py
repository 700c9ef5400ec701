"""Records as a trace of arrivals in the format of Mooncake's published traces; pure, without contents.

A line has `timestamp` (milliseconds since the first request of the trace), `input_length` and `output_length` (tokens),
and `hash_ids`, one for each block of 512 tokens of the prompt, the last one shorter
(github.com/kvcache-ai/Mooncake, FAST25-release/traces). An id stands for a block and all blocks before it, so that
requests share ids exactly as far as their prompts are equal. Ids are whole numbers in the order of appearance: they
contain nothing of the text. Models have ids of their own, because token ids mean different texts to them.

Memory: about 150 bytes for each distinct block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from headrace_logger.export.generations import output_tokens, sent_load
from headrace_protos.headrace_pb2 import PayloadRecord

BLOCK_TOKENS = 512
_DIGEST_BYTES = 16


class Trace:
    """The lines of one trace; records come in the order of their times."""

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
