"""Parts of payload records on their way from a request to the outbox.

They hold references to the contents of a request or an answer, which must not change afterwards; the thread that
writes encodes them (payload/encoding.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_protos.headrace_pb2 import PayloadChunk, Usage

# The memory that a part takes beside its contents.
PART_BYTES = 400
TOKEN_BYTES = 40
_TENSOR_BYTES = 300
_SMALL_BYTES = 4096  # To keep a message of this size costs less than to parse it.


class RecordedTensor(NamedTuple):
    """A tensor of a request or an answer.

    `data` are its raw contents, None if they are unknown or not kept; `size` is then their size, if it is known.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | None
    size: int | None = None


@dataclass(slots=True)
class DeferredTensors:
    """Tensors that are read with `read`; `size` is the bytes that the reference keeps in memory.

    `message` is what they are read from, if that is one small answer of a stream.
    `described` has the tensors without contents, if their sizes are known without reading them. `heads(most_bytes)`
    returns them without contents larger than `most_bytes` and without the reference; for the event loop.
    """

    read: Callable[[], Sequence[RecordedTensor]]
    size: int
    heads: Callable[[int], Tensors] | None = None
    described: Sequence[RecordedTensor] | None = None
    message: bytes | None = None


Tensors = Sequence[RecordedTensor] | DeferredTensors


def without_large(tensors: Tensors, most_bytes: int) -> Tensors:
    """The tensors without contents larger than `most_bytes`, which are no longer kept in memory either."""
    if isinstance(tensors, DeferredTensors):
        if not most_bytes and tensors.described is not None:
            return tensors.described
        is_small = tensors.size <= most_bytes + _SMALL_BYTES
        return tensors if is_small or tensors.heads is None else tensors.heads(most_bytes)
    return [
        tensor if len(tensor.data or b"") <= most_bytes else tensor._replace(data=None, size=len(tensor.data or b""))
        for tensor in tensors
    ]


def size_of(tensors: Tensors) -> int:
    """The bytes that the tensors keep in memory."""
    if isinstance(tensors, DeferredTensors):
        return tensors.size
    return sum(_TENSOR_BYTES + len(tensor.data or b"") for tensor in tensors)


class Begin(NamedTuple):
    """What is known of a request when it arrives; but for `time_us`, each is a field of PayloadRecord.

    `parameters` is JSON. The tap sets the time.
    """

    request_id: str
    model: str
    protocol: str
    prompt: str = ""
    parameters: str = ""
    trace_id: str = ""
    span_id: str = ""
    client: str = ""
    call_id: str = ""
    metadata: Mapping[str, str] = {}
    time_us: int = 0


class Chunk(NamedTuple):
    """A chunk of the answer, sent to the client `offset_ms` after the request arrived."""

    cost: int
    offset_ms: float
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    outputs: Tensors


@dataclass(slots=True, kw_only=True)
class End:
    """The outcome of the request; `predictors` have the milliseconds until the first token of each."""

    status: str
    message: str = ""
    failed_hop: str = ""
    finish_reason: str = ""
    usage: Usage | None = None
    text: str | None = None
    outputs: Tensors = ()
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    resumes: int = 0
    fingerprint: str = ""
    served_model: str = ""
    incomplete: bool = False
    engine_ms: float | None = None
    predictors: Sequence[tuple[str, float]] = ()
    prompt_ids: Sequence[int] = ()
    sampling: str = ""
    prompt_kind: str = ""
    continuity: str = ""


class OpenRecord:
    """The state of a record from its begin to its end; but for `waiting`, of the thread that writes."""

    __slots__ = (
        *("begin", "dropped", "has_ttft", "held", "held_bytes", "id", "incomplete", "inputs", "is_redacted"),
        *("is_settled", "segment", "waiting", "written", "written_bytes"),
    )

    def __init__(self, record_id: bytes, begin: Begin, inputs: Tensors) -> None:
        self.id = record_id
        self.begin = begin
        self.inputs = inputs
        self.written: list[bytes] = []  # The serialized parts that are on disk.
        self.written_bytes = 0
        self.segment = 0  # The one with the first of them.
        self.is_settled = False  # Whether its begin is on disk or dropped.
        self.waiting: asyncio.Future[None] | None = None  # Of the answer that waits for that.
        self.is_redacted = False  # Whether rules have changed the prompt or the parameters.
        self.incomplete = False
        self.dropped = False
        self.has_ttft = False
        self.held: list[PayloadChunk] = []  # Chunks that wait for the end, to be redacted.
        self.held_bytes = 0


@dataclass(slots=True)
class Write:
    """What is to be written of a record at once; the first one of a record has its begin."""

    record: OpenRecord
    cost: int
    chunks: Sequence[Chunk] = ()
    end: End | None = None
    encoded: bytes | None = None

    @property
    def size(self) -> int:
        """What is about to be copied; an end has the whole record with it."""
        return self.cost if self.end is None else self.cost + self.record.written_bytes
