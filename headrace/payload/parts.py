"""Parts of payload records on their way from the event loop to the writer thread.

A part holds references to the contents of a request or an answer; only the writer thread copies and encodes them. The
contents must not change afterwards.

`PartQueue` passes parts without a lock. Only the event loop's thread calls `begin`, `hurry`, `put`, `offer` and
`has_room`; only the writer thread calls the other methods. Each counter is changed by one thread alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_protos.headrace_pb2 import Usage

# The memory that a part takes beside its contents.
PART_BYTES = 400
TOKEN_BYTES = 40
_TENSOR_BYTES = 300
_SMALL_BYTES = 4096  # To keep a message of this size costs less than to parse it.
# The most characters of the prompt, and of the parameters, in a begin. The rest is written once the request is
# answered, so that refused requests never fill the disk.
BEGIN_CHARACTERS = 16 << 10


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
    """Tensors that the writer thread reads with `read`; `size` is the bytes that the reference keeps in memory.

    `described` has the tensors without contents, if their sizes are known without reading them. `heads(most_bytes)`
    returns them without contents larger than `most_bytes` and without the reference; for the event loop.
    """

    read: Callable[[], Sequence[RecordedTensor]]
    size: int
    heads: Callable[[int], Tensors] | None = None
    described: Sequence[RecordedTensor] | None = None


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


Settled = Callable[[], asyncio.Future[None] | None]


class Fields(NamedTuple):
    """The attributes of a request that are known when it arrives; each is a field of PayloadRecord."""

    request_id: str
    model: str
    prompt: str
    parameters: str
    trace_id: str
    span_id: str
    client: str
    call_id: str
    metadata: Mapping[str, str]


def is_long(fields: Fields) -> bool:
    """Whether the begin holds only the first characters of the prompt or of the parameters."""
    return len(fields.prompt) > BEGIN_CHARACTERS or len(fields.parameters) > BEGIN_CHARACTERS


class BeginPart(NamedTuple):
    """A request arrived.

    The writer thread calls `settled` once the part is on disk or dropped. If an answer waits for that, `settled`
    returns its future, to be resolved on the event loop. `is_awaited` is whether an answer waits. `arrived` is a time
    of the monotonic clock.
    """

    record_id: bytes
    cost: int
    time_us: int
    arrived: float
    protocol: str
    fields: Fields
    settled: Settled
    is_awaited: Callable[[], bool]


class RequestPart(NamedTuple):
    """The answer is about to begin: the rest of a long request is to be written; `settled` as in a begin."""

    record_id: bytes
    cost: int
    settled: Settled


class InputsPart(NamedTuple):
    """The tensors of the request."""

    record_id: bytes
    cost: int
    tensors: Tensors


class ChunkPart(NamedTuple):
    """A chunk of the answer, sent to the client `offset_ms` after the request arrived."""

    record_id: bytes
    cost: int
    offset_ms: float
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    outputs: Tensors


class EndPart(NamedTuple):
    """The outcome of the request."""

    record_id: bytes
    cost: int
    status: str
    message: str
    failed_hop: str
    finish_reason: str
    usage: Usage | None
    text: str | None
    outputs: Tensors
    ttft_ms: float | None
    duration_ms: float
    resumes: int
    fingerprint: str
    served_model: str
    incomplete: bool
    engine_ms: float | None
    predictors: Sequence[tuple[str, float]] = ()  # Each with the milliseconds until its first token.
    prompt_ids: Sequence[int] = ()
    sampling: str = ""
    prompt_kind: str = ""


LaterPart = RequestPart | InputsPart | ChunkPart | EndPart


class PartQueue:
    """Parts in order; begins have a queue of their own, so that none waits behind another request's tensors."""

    __slots__ = (
        *("_capacity_bytes", "_put_bytes", "_taken_bytes"),
        *("are_parts_hurried", "begins", "hurried", "looks_soon", "parts", "polled", "wake"),
    )

    def __init__(self, capacity_bytes: int) -> None:
        self.begins: deque[BeginPart] = deque()
        self.parts: deque[LaterPart] = deque()
        self.wake = threading.Event()
        self.polled = False  # The writer polls: a begin need not wake it.
        self.looks_soon = False  # The writer polls so often that a waiting answer need not wake it either.
        self.hurried = False  # An answer waits for something that was put since the writer's last poll.
        self.are_parts_hurried = False  # It waits for a later part than a begin.
        self._capacity_bytes = capacity_bytes
        self._put_bytes = 0
        self._taken_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """The size of the parts that are not yet written or dropped."""
        return self._put_bytes - self._taken_bytes

    @property
    def empty(self) -> bool:
        """Whether every part is written or dropped."""
        return self._put_bytes == self._taken_bytes

    def has_room(self, cost: int) -> bool:
        """Whether a part of this cost fits the capacity."""
        return self._put_bytes - self._taken_bytes + cost <= self._capacity_bytes

    def begin(self, part: BeginPart) -> None:
        """Enqueues a begin; wakes the writer if it does not poll."""
        self._put_bytes += part.cost
        self.begins.append(part)
        if not self.polled:
            self.wake.set()

    def hurry(self, with_parts: bool) -> None:
        """Asks the writer to write the begins at once, because an answer waits; `with_parts`: the later parts too."""
        self.are_parts_hurried |= with_parts
        self.hurried = True
        if not self.looks_soon:
            self.wake.set()

    def put(self, part: LaterPart) -> None:
        """Enqueues a part that follows a begin, even beyond the capacity; the writer polls within milliseconds."""
        self._put_bytes += part.cost
        self.parts.append(part)

    def offer(self, part: LaterPart) -> bool:
        """Enqueues a part that follows a begin if it fits the capacity; returns whether it does.

        It joins `has_room` and `put`, because function calls are most of a chunk's cost on the event loop.
        """
        put_bytes = self._put_bytes + part.cost
        if put_bytes - self._taken_bytes > self._capacity_bytes:
            return False
        self._put_bytes = put_bytes
        self.parts.append(part)
        return True

    def taken(self, cost: int) -> None:
        """Notes that parts of this cost were written or dropped."""
        self._taken_bytes += cost
