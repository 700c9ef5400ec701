"""The recording of one request; payload/tap.py opens it.

On the event loop's thread. Only `flushed` is awaited. No method raises, whatever its arguments: a part that cannot be
kept is counted as dropped and makes the record incomplete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.payload.drops import FAILED, MEMORY
from headrace.payload.ids import as_bytes, as_text
from headrace.payload.outbox.frames import whole_begin
from headrace.payload.outbox.journal import Journal
from headrace.payload.parts import (
    PART_BYTES,
    TOKEN_BYTES,
    BeginPart,
    ChunkPart,
    EndPart,
    Fields,
    InputsPart,
    RequestPart,
    Tensors,
    is_long,
    size_of,
    without_large,
)
from headrace.payload.rules import Digest, Mode
from headrace_protos.headrace_pb2 import Usage

if TYPE_CHECKING:
    from headrace.payload.tap import PayloadTap

_BEGIN_WAIT_S = 1.0
_MAX_PREDICTORS = 8
_new_tuple = tuple.__new__  # Makes a ChunkPart without a Python function call: every chunk of a stream pays for it.


class Recording:
    """The recording of one request; its public numbers and names may be set until it ends.

    `served_model` is the model that answers, if a route chose another one than the request names. `prompt_ids`,
    `sampling` and `prompt_kind` are as in PayloadRecord; they are kept where the request is.

    If its end has no usage, as where the caller or an error cuts an answer short, it is `prompt_tokens` and
    `completion_tokens`, which counts those of the chunks.

    As a context manager it ends with the block: with the block's error, or as CANCELLED if the block did not end it.
    """

    def __init__(self, tap: PayloadTap, number: int) -> None:
        self.resumes = 0
        self.fingerprint = ""
        self.served_model = ""
        self.prompt_tokens = 0
        self.prompt_ids: Sequence[int] = ()
        self.sampling = ""
        self.prompt_kind = ""
        self.engine_s: float | None = None
        self._predictors: list[tuple[str, float]] = []
        self.completion_tokens = 0
        self._id = as_bytes(number)
        self.record_id = as_text(self._id)
        self._tap = tap
        self._queue = tap._queue
        self._arrived = time.monotonic()
        self._ttft_ms: float | None = None
        self._open = False
        self._incomplete = False
        self._keeps_answer = False
        self._keeps_request = False
        # An answer waits for the begin and for the rest of a long request.
        self._awaited = 0  # How many of these parts there are; the event loop counts them.
        self._settled = 0  # How many of them are on disk or dropped; the writer counts them.
        self._is_short = False
        self._waiting: asyncio.Future[None] | None = None
        self._has_waited = False
        self._begun: BeginPart | None = None  # Until the first wait.
        self._journal: Journal | None = None  # The one that keeps the begin until it is settled.

    async def flushed(self) -> bool:
        """Waits until the begin is on disk or dropped; False if it is not within a second.

        Await it before each chunk is sent: only the first call may wait, and it does not if the journal has room.
        """
        begun, self._begun = self._begun, None
        has_waited, self._has_waited = self._has_waited, True
        has_rest = self._is_short
        if has_rest:
            self._write_rest()
        if self._is_settled() or has_waited or not self._tap._begins_answered:
            return self._is_settled() or self._journal is not None
        if begun is not None and self._put_in_journal(begun):
            return True
        loop = asyncio.get_running_loop()
        self._waiting = waiting = loop.create_future()
        if self._is_settled():  # The writer may have settled it before it saw the future.
            return True
        self._queue.hurry(has_rest)
        timer = loop.call_later(_BEGIN_WAIT_S, end_waits, (waiting,))
        try:
            await waiting
        finally:
            timer.cancel()
        if not self._is_settled():
            self._tap._stop_waiting()
        return self._is_settled()

    def chunk(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[float] = (), outputs: Tensors = ()
    ) -> None:
        """Adds the chunk that was sent to the client just now."""
        if not self._open:
            return
        try:
            offset_ms = (time.monotonic() - self._arrived) * 1000
            count = len(token_ids)
            if count and self._ttft_ms is None:
                self._ttft_ms = offset_ms
            self.completion_tokens += count
            if not self._keeps_answer:
                return
            cost = PART_BYTES + len(text) + TOKEN_BYTES * (count + len(logprobs))
            if outputs:
                outputs = self._without_large(outputs)
                cost += size_of(outputs)
            part = _new_tuple(ChunkPart, (self._id, cost, offset_ms, text, token_ids, logprobs, outputs))
            if not self._queue.offer(part):
                self._miss(MEMORY)
        except Exception:
            self._miss(FAILED, exc_info=True)

    def answered_by(self, predictor: str) -> None:
        """Notes that the next chunk is the first one of this predictor; only the newest notes are kept."""
        self._predictors.append((predictor, (time.monotonic() - self._arrived) * 1000))
        del self._predictors[:-_MAX_PREDICTORS]

    def end(
        self,
        status: str,
        message: str = "",
        failed_hop: str = "",
        finish_reason: str = "",
        usage: Usage | None = None,
        text: str | None = None,
        outputs: Tensors = (),
    ) -> None:
        """Ends the record; only the first call has an effect.

        `status` is the name of a gRPC status; `text` is the whole answer if it differs from the joined chunks.
        """
        if not self._open:
            return
        self._open = False
        if not self._keeps_answer:
            text, outputs = None, ()
        if usage is None and (self.prompt_tokens or self.completion_tokens):
            usage = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)
        duration_ms = (time.monotonic() - self._arrived) * 1000
        try:
            outputs, prompt_ids = self._within_memory(outputs), self._kept_ids()
            cost = PART_BYTES + len(text or "") + size_of(outputs) + TOKEN_BYTES * len(prompt_ids)
        except Exception:
            self._miss(FAILED, exc_info=True)
            outputs, text, prompt_ids, cost = (), None, (), PART_BYTES
        # Enqueued even beyond the capacity: there is one end for each open request, and a record needs its end.
        self._queue.put(
            EndPart(
                *(self._id, cost, status, message, failed_hop, finish_reason, usage, text, outputs),
                *(self._ttft_ms, duration_ms, self.resumes, self.fingerprint),
                *(self.served_model, self._incomplete),
                None if self.engine_s is None else 1000 * self.engine_s,
                self._predictors,
                prompt_ids,
                *((self.sampling, self.prompt_kind) if self._keeps_request else ("", "")),
            )
        )

    def end_with(self, error: HeadraceError) -> None:
        """Ends the record with an error."""
        self.end(error.status.name, error.message, error.hop or self._tap.hop)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HeadraceError):
            self.end_with(error)
        elif isinstance(error, Exception):
            self.end("INTERNAL", "internal error", self._tap.hop)
        else:
            self.end("CANCELLED", "aborted")

    def _begin(self, time_us: int, protocol: str, fields: Fields, inputs: Tensors) -> None:
        try:
            mode = self._tap.rules.mode(fields.model, fields.request_id, fields.client)
            if mode is Mode.OFF:
                return
            self._keeps_answer, self._keeps_request = mode.keeps_response, mode.keeps_request
            if not mode.keeps_request:
                fields, inputs = fields._replace(prompt="", parameters=""), ()
            cost = PART_BYTES + len(fields.prompt) + len(fields.parameters)
            if not self._queue.has_room(cost):
                self._tap._drops.count(MEMORY)
                return
            self._begun = BeginPart(
                *(self._id, cost, time_us, self._arrived, protocol, fields, self._settle, self._is_awaited)
            )
            self._queue.begin(self._begun)
            self._open, self._awaited = True, 1
            self._is_short = is_long(fields)
            if inputs:
                inputs = self._within_memory(inputs)
                self._queue.put(InputsPart(self._id, PART_BYTES + size_of(inputs), inputs))
        except Exception:
            self._miss(FAILED, exc_info=True)

    def _within_memory(self, tensors: Tensors) -> Tensors:
        """The tensors that are kept; none if the queue has no room for them: the record matters more."""
        tensors = self._without_large(tensors)
        if not tensors or self._queue.has_room(size_of(tensors)):
            return tensors
        self._miss(MEMORY)
        return ()

    def _kept_ids(self) -> Sequence[int]:
        """The prompt's ids; none if the queue has no room for them."""
        if not self._keeps_request or len(self.prompt_ids) == 0:
            return ()
        if self._queue.has_room(TOKEN_BYTES * len(self.prompt_ids)):
            return self.prompt_ids
        self._miss(MEMORY)
        return ()

    def _without_large(self, tensors: Tensors) -> Tensors:
        """The tensors without the contents that the writer would not read."""
        rules = self._tap.rules
        return tensors if rules.tensor_digest is not Digest.OFF else without_large(tensors, rules.tensor_bytes)

    def _miss(self, reason: str, *, exc_info: bool = False) -> None:
        self._tap._drops.count(reason, of_another=not self._incomplete, exc_info=exc_info)
        self._incomplete = True

    def _write_rest(self) -> None:
        """Enqueues the rest of a long request when its answer begins; after the end, the end writes it."""
        self._is_short = False
        if self._open:
            self._awaited += 1
            self._queue.put(RequestPart(self._id, PART_BYTES, self._settle))

    def _put_in_journal(self, begun: BeginPart) -> bool:
        """Puts the begin in the journal; returns whether it is there, or settled meanwhile."""
        try:
            journal = self._tap._journal_for(begun)
            if journal is None or not journal.put(self._id, whole_begin(begun)):
                return False
        except Exception:  # The writer counts what cannot be encoded.
            return False
        self._journal = journal
        if self._is_settled():  # The writer may have settled it before it saw the journal.
            journal.free(self._id)
        return True

    def _is_settled(self) -> bool:
        return self._settled == self._awaited

    def _is_awaited(self) -> bool:
        """For the writer's thread: whether an answer waits; it is set before the queue is hurried."""
        return self._waiting is not None

    def _settle(self) -> asyncio.Future[None] | None:
        """On the writer's thread: a part is on disk or dropped; returns the future of the answer that waits, if any."""
        self._settled += 1
        if not self._is_settled():
            return None
        if self._journal is not None:
            self._journal.free(self._id)
        return self._waiting


def end_waits(waits: Iterable[asyncio.Future[None]]) -> None:
    """Resolves the futures that answers wait for; on the event loop."""
    for wait in waits:
        if not wait.done():
            wait.set_result(None)
