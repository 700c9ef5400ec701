"""The recording of one request; payload/tap.py opens it.

On the event loop's thread. Only `flushed` is awaited. No method raises, whatever its arguments: a part that cannot be
kept is counted as dropped and makes the record incomplete.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.payload.drops import FAILED, MEMORY, Drops
from headrace.payload.parts import (
    PART_BYTES,
    TOKEN_BYTES,
    Begin,
    Chunk,
    End,
    OpenRecord,
    Tensors,
    Write,
    size_of,
    without_large,
)
from headrace.payload.records import as_bytes, as_text
from headrace.payload.rules import Digest, Mode, PayloadRules
from headrace.payload.writer import LATE_S, PayloadWriter, end_wait
from headrace_protos.headrace_pb2 import Usage

_BEGIN_WAIT_S = 1.0
_MAX_PREDICTORS = 8
_new_tuple = tuple.__new__  # Makes a Chunk without a Python function call: every chunk of a stream pays for it.


class Recorder(NamedTuple):
    """What the recordings of a process share; `hop` is the failed hop of recorded errors that name none."""

    rules: PayloadRules
    writer: PayloadWriter
    drops: Drops
    hop: str
    place: object  # Where records are written, for messages.


class Recording:
    """The recording of one request; its public numbers and names may be set until it ends.

    `served_model` is the model that answers, if a route chose another one than the request names. `prompt_ids`,
    `sampling` and `prompt_kind` are as in PayloadRecord; they are kept where the request is.

    If its end has no usage, as where the caller or an error cuts an answer short, it is `prompt_tokens` and
    `completion_tokens`, which counts those of the chunks.

    As a context manager it ends with the block: with the block's error, or as CANCELLED if the block did not end it.
    """

    def __init__(self, recorder: Recorder, number: int, begin: Begin, inputs: Tensors) -> None:
        self.resumes = 0
        self.fingerprint = ""
        self.served_model = ""
        self.prompt_tokens = 0
        self.prompt_ids: Sequence[int] = ()
        self.sampling = ""
        self.prompt_kind = ""
        self.continuity = ""
        self.engine_s: float | None = None
        self.completion_tokens = 0
        record_id = as_bytes(number)
        self.record_id = as_text(record_id)
        self._recorder = recorder
        self._writer = recorder.writer
        self._arrived = time.monotonic()
        self._predictors: list[dict[str, str | float]] = []  # PredictorParts.
        self._ttft_ms: float | None = None
        self._is_open = False
        self._is_written = False  # Whether the begin was put.
        self._has_waited = False
        self._incomplete = False
        self._keeps_answer = False
        self._keeps_request = False
        self._cost = 0  # Of what is to be put next.
        self._chunks: list[Chunk] = []
        self._late_at = 0.0  # For the first chunk that is not written.
        self._record: OpenRecord | None = None
        try:
            self._begin(record_id, begin, inputs)
        except Exception:
            self._miss(FAILED, exc_info=True)

    async def flushed(self) -> bool:
        """Waits until the begin is on disk or dropped; False if it is not within a second.

        Await it before each chunk is sent: only the first call may wait, and usually it does not.
        """
        record = self._record
        if record is None:
            return self._writer.answers
        if not self._is_written:
            self._write()
        if self._is_settled() or self._has_waited or not self._writer.answers:
            return self._is_settled()
        self._has_waited = True
        loop = asyncio.get_running_loop()
        record.waiting = waiting = loop.create_future()
        if self._is_settled():  # The writer may have settled it before it saw the future.
            return True
        timer = loop.call_later(_BEGIN_WAIT_S, end_wait, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
        if not self._is_settled():
            self._writer.stop_waiting(self._recorder.place)
        return self._is_settled()

    def chunk(
        self, text: str, token_ids: Sequence[int] = (), logprobs: Sequence[float] = (), outputs: Tensors = ()
    ) -> None:
        """Adds the chunk that was sent to the client just now."""
        if not self._is_open:
            return
        try:
            now = time.monotonic()
            offset_ms = (now - self._arrived) * 1000
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
            if not self._writer.reserve(cost):
                self._miss(MEMORY)
                return
            self._cost += cost
            self._chunks.append(_new_tuple(Chunk, (cost, offset_ms, text, token_ids, logprobs, outputs)))
            if len(self._chunks) == 1:
                self._late_at = now + LATE_S
                self._writer.later(self._write)
            elif now >= self._late_at:
                self._write()
        except Exception:
            self._miss(FAILED, exc_info=True)

    def answered_by(self, predictor: str) -> None:
        """Notes that the next chunk is the first one of this predictor; only the newest notes are kept."""
        self._predictors.append({"predictor": predictor, "offset_ms": (time.monotonic() - self._arrived) * 1000})
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
        if not self._is_open:
            return
        self._is_open = False
        if not self._keeps_answer:
            text, outputs = None, ()
        if usage is None and (self.prompt_tokens or self.completion_tokens):
            usage = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens)
        duration_ms = (time.monotonic() - self._arrived) * 1000
        try:
            outputs, prompt_ids = self._without_large(outputs), self.prompt_ids if self._keeps_request else ()
            # The record matters more than its contents: those for which there is no room are left out.
            outputs = outputs if self._has_room(size_of(outputs)) else ()
            prompt_ids = prompt_ids if self._has_room(TOKEN_BYTES * len(prompt_ids)) else ()
            cost = PART_BYTES + len(text or "") + size_of(outputs) + TOKEN_BYTES * len(prompt_ids)
        except Exception:
            self._miss(FAILED, exc_info=True)
            outputs, text, prompt_ids, cost = (), None, (), PART_BYTES
        fields = {
            "status": status,
            "message": message,
            "failed_hop": failed_hop,
            "finish_reason": finish_reason,
            "usage": usage,
            "text": text,
            "ttft_ms": self._ttft_ms,
            "duration_ms": duration_ms,
            "resumes": self.resumes,
            "fingerprint": self.fingerprint,
            "served_model": self.served_model,
            "incomplete": self._incomplete,
            "engine_ms": None if self.engine_s is None else 1000 * self.engine_s,
            "predictors": self._predictors,
            "prompt_ids": prompt_ids,
            "sampling": self.sampling if self._keeps_request else "",
            "prompt_kind": self.prompt_kind if self._keeps_request else "",
            "continuity": self.continuity,
        }
        # Put even beyond the memory: there is one end for each open request, and a record needs its end.
        self._write(End(fields, outputs), cost)

    def end_with(self, error: HeadraceError) -> None:
        self.end(error.status.name, error.message, error.hop or self._recorder.hop)

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HeadraceError):
            self.end_with(error)
        elif isinstance(error, Exception):
            self.end("INTERNAL", "internal error", self._recorder.hop)
        else:
            self.end("CANCELLED", "aborted")

    def _begin(self, record_id: bytes, begin: Begin, inputs: Tensors) -> None:
        mode = self._recorder.rules.mode(begin.model, begin.request_id, begin.client)
        if mode is Mode.OFF:
            return
        self._keeps_answer, self._keeps_request = mode.keeps_response, mode.keeps_request
        if not self._keeps_request:
            begin, inputs = begin._replace(prompt="", parameters=""), ()
        cost = PART_BYTES + len(begin.prompt) + len(begin.parameters)
        if not self._writer.reserve(cost):
            self._recorder.drops.count(MEMORY)
            return
        self._cost, self._is_open = cost, True
        if inputs:
            inputs = self._without_large(inputs)
            if self._writer.reserve(size := size_of(inputs)):
                self._cost += size
            else:
                inputs = ()
                self._miss(MEMORY)
        self._record = OpenRecord(record_id, begin, inputs)
        self._writer.later(self._write)

    def _write(self, end: End | None = None, more: int = 0) -> None:
        """Puts what is not put yet."""
        record = self._record
        if record is None or (self._is_written and not self._chunks and end is None):
            return
        chunks, self._chunks = self._chunks, []
        cost, self._cost = self._cost, 0
        self._is_written = True
        record.incomplete |= self._incomplete
        self._writer.put(Write(record, cost + more, chunks, end), more)

    def _is_settled(self) -> bool:
        return self._record is not None and self._record.is_settled

    def _has_room(self, cost: int) -> bool:
        """Whether there is memory for some contents of the end; counts them as dropped if there is none."""
        if not cost or self._writer.has_room(cost):
            return True
        self._miss(MEMORY)
        return False

    def _without_large(self, tensors: Tensors) -> Tensors:
        """The tensors without the contents that the writer would not read."""
        rules = self._recorder.rules
        return tensors if rules.tensor_digest is not Digest.OFF else without_large(tensors, rules.tensor_bytes)

    def _miss(self, reason: str, *, exc_info: bool = False) -> None:
        self._recorder.drops.count(reason, of_another=not self._incomplete, exc_info=exc_info)
        self._incomplete = True
