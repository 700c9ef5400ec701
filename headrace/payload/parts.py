"""Parts of payload records on their way from a request to the outbox.

They hold references to the contents of a request or an answer, which must not change afterwards; the thread that
writes encodes them (payload/encoding.py).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace_protos.headrace_pb2 import PayloadChunk

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
    heads: "Callable[[int], Tensors] | None" = None
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


class End(NamedTuple):
    """The outcome of the request: fields of PayloadRecord by name, whose texts need not be UTF-8, and the tensors."""

    fields: Mapping[str, Any]
    outputs: Tensors


@dataclass(slots=True, eq=False)
class OpenRecord:
    """The state of a record from its begin to its end; but for `waiting`, of the thread that writes."""

    id: bytes
    begin: Begin
    inputs: Tensors
    written: list[bytes] = field(default_factory=list)  # The serialized parts that are on disk.
    written_bytes: int = 0
    segment: int = 0  # The one with the first of them.
    is_settled: bool = False  # Whether its begin is on disk or dropped.
    waiting: asyncio.Future[None] | None = None  # Of the answer that waits for that.
    is_redacted: bool = False  # Whether rules have changed the prompt or the parameters.
    incomplete: bool = False
    dropped: bool = False
    has_ttft: bool = False
    held: list[PayloadChunk] = field(default_factory=list)  # Chunks that wait for the end, to be redacted.
    held_bytes: int = 0


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
