"""Parts of payload records on their way from the event loop to the writer thread.

A part holds references to what a request or an answer is made of; nothing is copied or encoded before
the writer thread does so. What is handed in must not change afterwards.

`PartQueue` hands parts over without a lock: `begin`, `hurry`, `put`, `offer` and `has_room` belong to the event loop's
thread, the rest to the writer's. Each counter has one thread that changes it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace_protos.millrace_pb2 import Usage

# What a part takes in memory beside the contents that are counted.
PART_BYTES = 400
TOKEN_BYTES = 40
_TENSOR_BYTES = 300
_SMALL_BYTES = 4096  # A message that is so small costs less to keep than to take apart.
# A begin has no more of the prompt and of the parameters than this; the rest follows once the request is answered, so
# that what is refused never fills the disk.
BEGIN_CHARACTERS = 16 << 10


class RecordedTensor(NamedTuple):
    """A tensor of a request or an answer.

    `data` are its raw contents, None where they are unknown or not kept; `size` is then their size, if that is known.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | None
    size: int | None = None


@dataclass(slots=True)
class DeferredTensors:
    """Tensors that the writer thread reads, by `read`; `size` is how many bytes the reference keeps in memory.

    `described` has them without contents, where their sizes are known without reading them. `heads(most_bytes)` returns
    them without contents of more bytes and without the reference; for the event loop.
    """

    read: Callable[[], Sequence[RecordedTensor]]
    size: int
    heads: Callable[[int], Tensors] | None = None
    described: Sequence[RecordedTensor] | None = None


Tensors = Sequence[RecordedTensor] | DeferredTensors


def without_large(tensors: Tensors, most_bytes: int) -> Tensors:
    """The tensors without contents of more bytes, which are not kept in memory either."""
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
    """What is known of a request when it arrives; each is a field of PayloadRecord."""

    request_id: str
    model: str
    prompt: str
    parameters: str
    trace_id: str
    span_id: str
    client: str
    call_id: str
    shadow_of: str
    metadata: Mapping[str, str]


def is_long(fields: Fields) -> bool:
    """Whether a begin leaves out some of the request."""
    return len(fields.prompt) > BEGIN_CHARACTERS or len(fields.parameters) > BEGIN_CHARACTERS


class BeginPart(NamedTuple):
    """A request arrived; `settled` is called on the writer thread once the part lies on disk or was dropped.

    It returns what is to be ended on the event loop, where an answer waits. `is_awaited` is whether one does. `arrived`
    is a time of the monotonic clock.
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
    """The request is about to be answered: what of it the begin left out is written; `settled` as of a begin."""

    record_id: bytes
    cost: int
    settled: Settled


class InputsPart(NamedTuple):
    record_id: bytes
    cost: int
    tensors: Tensors


class ChunkPart(NamedTuple):
    """What went to the client, `offset_ms` after the request arrived."""

    record_id: bytes
    cost: int
    offset_ms: float
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    outputs: Tensors


class EndPart(NamedTuple):
    """What became of the request."""

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


LaterPart = RequestPart | InputsPart | ChunkPart | EndPart


class PartQueue:
    """Parts in their order; begins apart, so that none waits behind another request's tensors."""

    __slots__ = (
        *("_capacity_bytes", "_put_bytes", "_taken_bytes"),
        *("are_parts_hurried", "begins", "hurried", "looks_soon", "parts", "polled", "wake"),
    )

    def __init__(self, capacity_bytes: int) -> None:
        self.begins: deque[BeginPart] = deque()
        self.parts: deque[LaterPart] = deque()
        self.wake = threading.Event()
        self.polled = False  # Whether the writer looks by itself, so that a begin need not wake it,
        self.looks_soon = False  # and so soon that an answer that waits need not either.
        self.hurried = False  # Whether an answer waits for what has been put since the writer looked last,
        self.are_parts_hurried = False  # and not only for a begin.
        self._capacity_bytes = capacity_bytes
        self._put_bytes = 0
        self._taken_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """What the parts take that the writer has yet to write."""
        return self._put_bytes - self._taken_bytes

    @property
    def empty(self) -> bool:
        """Whether the writer has taken and dealt with every part."""
        return self._put_bytes == self._taken_bytes

    def has_room(self, cost: int) -> bool:
        """Whether a part of that cost is within the capacity."""
        return self._put_bytes - self._taken_bytes + cost <= self._capacity_bytes

    def begin(self, part: BeginPart) -> None:
        """Puts a begin; wakes the writer where it would not look soon."""
        self._put_bytes += part.cost
        self.begins.append(part)
        if not self.polled:
            self.wake.set()

    def hurry(self, with_parts: bool) -> None:
        """Has begins written, and with them what else was put, for an answer that waits for it."""
        self.are_parts_hurried |= with_parts
        self.hurried = True
        if not self.looks_soon:
            self.wake.set()

    def put(self, part: LaterPart) -> None:
        """Puts what follows a begin, whatever room there is; the writer finds it by itself within milliseconds."""
        self._put_bytes += part.cost
        self.parts.append(part)

    def offer(self, part: LaterPart) -> bool:
        """Puts what follows a begin if there is room for it, and tells whether there was.

        `has_room` and `put` in one: of what a chunk costs the event loop, calls are the most.
        """
        put_bytes = self._put_bytes + part.cost
        if put_bytes - self._taken_bytes > self._capacity_bytes:
            return False
        self._put_bytes = put_bytes
        self.parts.append(part)
        return True

    def taken(self, cost: int) -> None:
        """Tells that parts of that cost have been dealt with."""
        self._taken_bytes += cost
